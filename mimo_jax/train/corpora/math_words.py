"""Word lists of the word problems, and what a problem function returns (scene `math`)."""

Problem = tuple[str, list[str], int]  # question, steps of the solution, result

NAMES = (
    "Anna Ben Carla David Emma Felix Grace Hugo Ida Jonas Kira Leo Mona Noah Olga Paul Rosa Sam "
    "Tina Umar Vera Walt Yuki Zoe Amir Bella Chen Dora Eli Fatima Gus Hana Ivan June Karl Lily "
    "Marco Nina Oscar Petra Quinn Ravi Sofia Tom Ulla Viktor Wendy Xena Yara Zack"
).split()
ITEMS = (
    "apples pears plums eggs coins stamps books pens cards shells marbles beads cookies candles "
    "stickers balloons tickets bricks buttons bottles cups plates chairs lamps roses tulips seeds "
    "peaches melons muffins rolls pies toys balls hats socks keys stones sticks badges posters "
    "magnets crayons brushes ribbons tiles nails boxes flags kites"
).split()
BINS = "boxes bags baskets shelves crates jars trays drawers rows packs bundles tins".split()
PLACES = "market school farm library garden harbor museum bakery office station park club".split()


def upper_first(text: str) -> str:
    """Returns text with a capital at its start, the rest unchanged."""
    return text[0].upper() + text[1:]
