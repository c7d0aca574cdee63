"""The tools of scene `agent`: their parameters, how people ask for them, what they return.

Placeholders in the sentences are parameters or result fields; each has a kind, and VALUES says how
to draw a value of a kind.
"""

import dataclasses
import random
from collections.abc import Callable

from mimo_jax.train.corpora.document import pick


@dataclasses.dataclass(frozen=True)
class Tool:
    """One tool; `args` and `results` map a name to the kind of its value."""

    name: str
    about: str
    args: dict[str, str]
    results: dict[str, str]
    asks: tuple[str, ...]
    plans: tuple[str, ...]
    answers: tuple[str, ...]


_CITIES = (
    "Berlin Paris Rome Oslo Lima Cairo Kyoto Boston Madrid Vienna Prague Dublin Athens Lisbon "
    "Warsaw Helsinki Seoul Delhi Nairobi Quito Toronto Denver Austin Perth Geneva Zurich Porto "
    "Milan Naples Turin Bergen Malmo Ghent Lyon Nice Bilbao Seville Krakow Riga Tallinn"
).split()
_PEOPLE = (
    "Anna Ben Carla David Emma Felix Grace Hugo Ida Jonas Kira Leo Mona Noah Olga Paul Rosa Sam "
    "Tina Umar Vera Walt Yuki Zoe Amir Bella Chen Dora Eli Fatima"
).split()
_WORDS = {
    "city": _CITIES,
    "person": _PEOPLE,
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "unit": ("celsius", "fahrenheit"),
    "sky": "sunny cloudy rainy windy snowy foggy clear stormy".split(),
    "topic": "budget hiring launch travel training design safety sales garden website".split(),
    "room": "kitchen bedroom office hall cellar garage bathroom studio".split(),
    "food": "pizza sushi pasta curry tacos ramen salad soup burgers dumplings".split(),
    "product": "lamp chair desk kettle tent bike camera clock printer heater jacket rug".split(),
    "color": "red blue green white black yellow grey brown".split(),
    "size": "small medium large".split(),
    "stock": "ACME NOVA ORBIT DELTA PIXEL HELIO TERRA QUARK LUMEN VEGA".split(),
    "currency": "EUR USD GBP JPY CHF SEK NOK CAD".split(),
    "language": "French German Spanish Italian Dutch Polish Greek Turkish".split(),
    "phrase": (
        "good morning", "thank you", "see you soon", "where is the station", "how much is it",
        "happy birthday", "please wait", "the bill please", "have a nice trip", "I am lost",
    ),
    "foreign": "merci ciao danke hola grazie prego bitte gracias dank salut".split(),
    "genre": "jazz rock folk techno opera blues pop reggae".split(),
    "song": ("Blue River", "Night Train", "Old Bridge", "Paper Moon", "Silver Road", "First Snow"),
    "book": ("The Lighthouse", "Stone Garden", "A Quiet Year", "The Map", "Winter Bees", "Salt"),
    "shelf": "A B C D E F G H".split(),
    "state": "open closed pending done shipped delayed ready blocked".split(),
    "task": (
        "buy milk", "call the bank", "water the plants", "pay the rent", "book a hotel",
        "clean the car", "send the report", "feed the cat", "fix the door", "print the slides",
    ),
    "sport": "tennis football hockey chess rowing cycling handball golf".split(),
    "team": "Reds Blues Lions Hawks Foxes Bears Stars Wolves".split(),
    "airline": "Nordair SkyLine BlueJet Avanta Polar Meridian".split(),
    "mode": "bus train car bike tram ferry".split(),
    "folder": "inbox archive drafts invoices photos music reports backup".split(),
    "filetype": "pdf txt png csv zip docx".split(),
    "mood": "calm bright warm dim soft cold".split(),
    "crop": "wheat corn beans peas carrots onions potatoes barley".split(),
}  # fmt: skip

VALUES: dict[str, Callable[[random.Random], str]] = {
    "small": lambda r: str(r.randint(2, 9)),
    "number": lambda r: str(r.randint(10, 99)),
    "big": lambda r: str(r.randint(100, 999)),
    "money": lambda r: f"{r.randint(3, 299)}.{r.randint(0, 9)}0",
    "degrees": lambda r: str(r.randint(-9, 38)),
    "percent": lambda r: str(r.randint(5, 95)),
    "time": lambda r: f"{r.randint(6, 22):02d}:{r.choice((0, 15, 30, 45)):02d}",
    "date": lambda r: f"2025-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}",
    "code": lambda r: (
        f"{pick(r, 'ABCDEFGHKLMNPRST')}{pick(r, 'ABCDEFGHKLMNPRST')}{r.randint(10, 99)}"
    ),
    "minutes": lambda r: str(r.randint(1, 18) * 5),
}
VALUES |= {kind: (lambda r, options=tuple(o): pick(r, options)) for kind, o in _WORDS.items()}

# Packed by hand: the formatter would give every argument a line of its own.
# fmt: off
TOOLS = (
    Tool("get_weather", "weather of a city",
         {"city": "city", "day": "day", "unit": "unit"},
         {"sky": "sky", "degrees": "degrees", "wind": "number"},
         ("What will the weather be in {city} on {day}, in {unit}?",
          "Tell me the {unit} forecast for {city} this {day}.",
          "I travel to {city} on {day}. How is the weather there in {unit}?"),
         ("I will look up the forecast for {city} on {day}.", "Checking the weather in {city}."),
         ("On {day} it will be {sky} in {city} with {degrees} degrees {unit} and wind at "
          "{wind} km/h.",
          "Expect {sky} skies in {city} on {day}: {degrees} degrees {unit}, wind {wind} km/h.")),
    Tool("book_table", "reserve a restaurant table",
         {"food": "food", "city": "city", "guests": "small", "time": "time"},
         {"place": "person", "table": "number", "code": "code"},
         ("Book a table for {guests} at a {food} place in {city} at {time}.",
          "We are {guests} and want {food} in {city}, at {time}. Please reserve.",
          "Can you get us a {food} table in {city} for {guests} people at {time}?"),
         ("I will reserve a table for {guests} in {city}.",
          "Let me book {food} in {city} for {time}."),
         ("Table {table} at {place}'s in {city} is yours at {time} for {guests}. The "
          "code is {code}.",
          "Done: {food} at {place}'s, table {table}, {time}, {guests} guests, code {code}.")),
    Tool("find_flight", "flights between two cities",
         {"origin": "city", "destination": "city2", "date": "date"},
         {"airline": "airline", "departs": "time", "price": "money"},
         ("Find a flight from {origin} to {destination} on {date}.",
          "I need to fly from {origin} to {destination} on {date}.",
          "Which flight goes from {origin} to {destination} on {date}?"),
         ("I will search flights from {origin} to {destination}.",
          "Looking for flights on {date}."),
         ("{airline} flies from {origin} to {destination} on {date} at {departs} for "
          "{price} euros.",
          "The best flight is {airline} at {departs} on {date}: {origin} to "
          "{destination}, {price} euros.")),
    Tool("send_email", "send an email",
         {"to": "person", "subject": "topic", "when": "time"}, {"status": "state", "id": "code"},
         ("Send {to} an email about the {subject} at {when}.",
          "Please mail {to} at {when}, the subject is {subject}.",
          "At {when} write to {to} about {subject}."),
         ("I will schedule the email to {to}.", "Preparing a message about {subject} for {to}."),
         ("The email to {to} about {subject} is set for {when}; its id is {id} and it is {status}.",
          "Your message {id} on {subject} goes to {to} at {when}. Status: {status}.")),
    Tool("create_event", "add a calendar event",
         {"title": "topic", "day": "day", "time": "time", "minutes": "minutes"},
         {"id": "code", "conflicts": "small"},
         ("Put a {title} meeting in my calendar on {day} at {time} for {minutes} minutes.",
          "Schedule {title} on {day}, {time}, {minutes} minutes long.",
          "I need {minutes} minutes for {title} on {day} at {time}."),
         ("I will add the {title} meeting on {day}.", "Creating an event for {day} at {time}."),
         ("The {title} meeting is on {day} at {time} for {minutes} minutes. Event {id} "
          "has {conflicts} conflicts.",
          "Event {id} is saved: {title}, {day} {time}, {minutes} minutes, {conflicts} conflicts.")),
    Tool("convert_money", "convert an amount of money",
         {"amount": "big", "source": "currency", "target": "currency2"},
         {"result": "money", "rate": "small"},
         ("How much is {amount} {source} in {target}?",
          "Convert {amount} {source} to {target}.",
          "I have {amount} {source}. What is that in {target}?"),
         ("I will convert {amount} {source}.", "Let me check the rate from {source} to {target}."),
         ("{amount} {source} are {result} {target} at rate {rate}.",
          "At a rate of {rate} you get {result} {target} for {amount} {source}.")),
    Tool("stock_price", "price of a stock",
         {"symbol": "stock", "date": "date"},
         {"price": "money", "volume": "big", "change": "small"},
         ("What did {symbol} cost on {date}?",
          "Give me the price of {symbol} stock on {date}.",
          "How was {symbol} doing on {date}?"),
         ("I will fetch {symbol} for {date}.", "Looking up the price of {symbol}."),
         ("{symbol} stood at {price} on {date}, up {change} percent, with a volume of {volume}.",
          "On {date} {symbol} cost {price}; it rose by {change} percent on {volume} trades.")),
    Tool("translate", "translate a phrase",
         {"text": "phrase", "language": "language"}, {"result": "foreign", "score": "percent"},
         ("How do you say '{text}' in {language}?",
          "Translate '{text}' into {language}.",
          "I want to say '{text}' in {language}."),
         ("I will translate it into {language}.", "Asking for the {language} words."),
         ("In {language}, '{text}' is '{result}'; the score is {score} percent.",
          "'{text}' becomes '{result}' in {language} with {score} percent confidence.")),
    Tool("add_task", "add an item to the to-do list",
         {"task": "task", "day": "day", "priority": "small"}, {"id": "code", "open": "number"},
         ("Remind me to {task} on {day} with priority {priority}.",
          "Add '{task}' to my list for {day}, priority {priority}.",
          "I must {task} on {day}. Priority {priority}, please note it."),
         ("I will note it for {day}.", "Adding '{task}' to your list."),
         ("'{task}' is on your list for {day} with priority {priority}. It is task {id} of {open}.",
          "Task {id}: {task} on {day}, priority {priority}. You have {open} open tasks.")),
    Tool("set_lights", "control the lights",
         {"room": "room", "mood": "mood", "level": "percent"},
         {"lamps": "small", "watts": "number"},
         ("Make the {room} light {mood} at {level} percent.",
          "Set the {room} lamps to {level} percent and {mood}.",
          "I want {mood} light in the {room}, {level} percent."),
         ("I will set the lights in the {room}.", "Changing the {room} to {mood} light."),
         ("The {lamps} lamps in the {room} are {mood} at {level} percent and use {watts} watts.",
          "{lamps} lamps in the {room} now give {mood} light at {level} percent, {watts} watts.")),
    Tool("set_heating", "set the heating of a room",
         {"room": "room", "degrees": "number", "until": "time"},
         {"now": "number", "ready": "minutes"},
         ("Heat the {room} to {degrees} degrees until {until}.",
          "Keep the {room} at {degrees} degrees until {until}.",
          "It is cold in the {room}; set {degrees} degrees until {until}."),
         ("I will heat the {room} to {degrees}.", "Setting the heating of the {room}."),
         ("The {room} is at {now} degrees and reaches {degrees} in {ready} minutes. It "
          "stays so until {until}.",
          "In {ready} minutes the {room} goes from {now} to {degrees} degrees, until {until}.")),
    Tool("order_product", "order something from the shop",
         {"product": "product", "color": "color", "count": "small"},
         {"price": "money", "arrives": "date"},
         ("Order {count} {color} {product} pieces.",
          "I would like {count} of the {product} in {color}.",
          "Please buy {count} times the {color} {product}."),
         ("I will order the {color} {product}.", "Placing an order for {count} pieces."),
         ("{count} {color} {product} pieces are ordered for {price} euros; they arrive "
          "on {arrives}.",
          "Your order of {count} times {product} in {color} costs {price} euros and "
          "comes on {arrives}.")),
    Tool("track_parcel", "find a parcel by its code",
         {"code": "code", "city": "city"}, {"status": "state", "place": "city", "eta": "date"},
         ("Where is my parcel {code} to {city}?",
          "Track parcel {code}, it goes to {city}.",
          "Has {code} reached {city} yet?"),
         ("I will track parcel {code}.", "Looking for {code} on its way to {city}."),
         ("Parcel {code} is {status} in {place} and should reach {city} on {eta}.",
          "It is {status}: {code} was seen in {place} and comes to {city} on {eta}.")),
    Tool("play_music", "play music in a room",
         {"genre": "genre", "room": "room", "volume": "percent"},
         {"song": "song", "artist": "person", "minutes": "small"},
         ("Play some {genre} in the {room} at volume {volume}.",
          "I want {genre} music in the {room}, volume {volume}.",
          "Put on {genre} at {volume} percent in the {room}."),
         ("I will play {genre} in the {room}.", "Starting some {genre} at volume {volume}."),
         ("Now playing '{song}' by {artist} in the {room}, {minutes} minutes of {genre} "
          "at {volume}.",
          "'{song}' by {artist} runs in the {room}: {genre}, {minutes} minutes, volume {volume}.")),
    Tool("find_book", "search the library",
         {"title": "book", "branch": "city"},
         {"shelf": "shelf", "row": "number", "copies": "small"},
         ("Does the {branch} library have '{title}'?",
          "Find '{title}' in the {branch} branch.",
          "I am looking for '{title}' in {branch}."),
         ("I will search the {branch} branch.", "Looking for '{title}'."),
         ("'{title}' stands in {branch} on shelf {shelf}, row {row}; {copies} copies are free.",
          "{branch} has {copies} copies of '{title}' on shelf {shelf} in row {row}.")),
    Tool("plan_route", "route between two cities",
         {"start": "city", "end": "city2", "mode": "mode"}, {"km": "big", "hours": "small"},
         ("How do I get from {start} to {end} by {mode}?",
          "Plan a {mode} trip from {start} to {end}.",
          "How far is it by {mode} from {start} to {end}?"),
         ("I will plan the way to {end}.", "Checking the {mode} route from {start}."),
         ("By {mode} it is {km} km from {start} to {end}, about {hours} hours.",
          "The {mode} takes {hours} hours for the {km} km between {start} and {end}.")),
    Tool("match_result", "result of a match",
         {"team": "team", "sport": "sport", "date": "date"},
         {"own": "small", "other": "small", "rival": "team2"},
         ("How did the {team} do in {sport} on {date}?",
          "What was the {sport} result of the {team} on {date}?",
          "Did the {team} win at {sport} on {date}?"),
         ("I will look up the {team}.", "Checking the {sport} results of {date}."),
         ("On {date} the {team} scored {own} and the {rival} {other} in {sport}.",
          "The {sport} match of {date} ended {own} to {other}: {team} against {rival}.")),
    Tool("list_files", "list files of a folder",
         {"folder": "folder", "kind": "filetype", "limit": "small"},
         {"found": "number", "size": "big"},
         ("List up to {limit} {kind} files in {folder}.",
          "Which {kind} files are in {folder}? Show {limit}.",
          "Show me {limit} {kind} files of the {folder} folder."),
         ("I will look into {folder}.", "Listing {kind} files."),
         ("The {folder} folder has {found} {kind} files of {size} MB; here are {limit}.",
          "I found {found} {kind} files in {folder}, {size} MB in all, and show {limit}.")),
    Tool("move_file", "move a file",
         {"name": "topic", "kind": "filetype", "target": "folder"},
         {"moved": "small", "free": "big"},
         ("Move {name}.{kind} to {target}.",
          "Put the file {name}.{kind} into {target}.",
          "Please store {name}.{kind} in the {target} folder."),
         ("I will move {name}.{kind}.", "Moving it into {target}."),
         ("{name}.{kind} is in {target} now; {moved} items moved, {free} MB are free.",
          "Moved {moved} items: {name}.{kind} lies in {target}, which has {free} MB left.")),
    Tool("set_timer", "start a timer",
         {"minutes": "minutes", "label": "food", "room": "room"}, {"ends": "time", "id": "code"},
         ("Start a {minutes} minute timer for the {label} in the {room}.",
          "Wake me in the {room} in {minutes} minutes, {label} is cooking.",
          "Set {minutes} minutes for {label} in the {room}."),
         ("I will start a timer in the {room}.", "Setting {minutes} minutes."),
         ("Timer {id} for the {label} rings in the {room} at {ends}, in {minutes} minutes.",
          "In {minutes} minutes, at {ends}, timer {id} in the {room} ends the {label}.")),
    Tool("water_field", "water a field",
         {"crop": "crop", "field": "small", "liters": "big"},
         {"moisture": "percent", "minutes": "minutes"},
         ("Give field {field} with the {crop} {liters} liters.",
          "Water the {crop} on field {field} with {liters} liters.",
          "The {crop} of field {field} need {liters} liters of water."),
         ("I will water field {field}.", "Sending {liters} liters to the {crop}."),
         ("Field {field} gets {liters} liters over {minutes} minutes; the {crop} are at "
          "{moisture} percent.",
          "The {crop} on field {field} are at {moisture} percent; {liters} liters take "
          "{minutes} minutes.")),
    Tool("rent_car", "rent a car",
         {"city": "city", "size": "size", "days": "small"},
         {"price": "money", "color": "color", "plate": "code"},
         ("Rent a {size} car in {city} for {days} days.",
          "I need a {size} car for {days} days in {city}.",
          "Get me a {size} car in {city}, {days} days."),
         ("I will rent a {size} car in {city}.", "Looking for cars in {city}."),
         ("A {color} {size} car with plate {plate} waits in {city}: {days} days for {price} euros.",
          "In {city} you get the {color} car {plate}, {size}, {days} days at {price} euros.")),
    Tool("open_ticket", "open a support ticket",
         {"product": "product", "person": "person", "level": "small"},
         {"id": "code", "status": "state", "answer": "day"},
         ("Open a level {level} ticket for {person}: the {product} is broken.",
          "The {product} of {person} fails. File a ticket at level {level}.",
          "Report a broken {product} for {person}, level {level}."),
         ("I will open a ticket for {person}.", "Filing the problem with the {product}."),
         ("Ticket {id} for {person}'s {product} is {status} at level {level}; expect an "
          "answer on {answer}.",
          "{person}'s {product} has ticket {id}, level {level}. It is {status}, answer "
          "by {answer}.")),
    Tool("measure_air", "air quality of a room",
         {"room": "room", "time": "time"},
         {"quality": "percent", "degrees": "number", "dust": "small"},
         ("How was the air in the {room} at {time}?",
          "Measure the {room} air as of {time}.",
          "Give me the air values of the {room} for {time}."),
         ("I will read the sensor in the {room}.", "Reading the {time} values."),
         ("At {time} the {room} had {quality} percent quality, {degrees} degrees and dust {dust}.",
          "The {room} air at {time}: quality {quality}, {degrees} degrees, dust level {dust}.")),
    Tool("pay_invoice", "pay an invoice",
         {"code": "code", "amount": "money", "date": "date"}, {"balance": "big", "status": "state"},
         ("Pay invoice {code} of {amount} euros on {date}.",
          "Transfer {amount} euros for {code} on {date}.",
          "Invoice {code} over {amount} euros is due on {date}, please pay."),
         ("I will pay invoice {code}.", "Transferring {amount} euros."),
         ("Invoice {code} over {amount} euros is {status} for {date}; your balance is "
          "{balance} euros.",
          "{amount} euros go out on {date} for {code}: {status}. {balance} euros remain.")),
    Tool("find_hotel", "search for hotels",
         {"city": "city", "nights": "small", "guests": "small"},
         {"hotel": "book", "price": "money", "stars": "small"},
         ("Find a hotel in {city} for {nights} nights and {guests} guests.",
          "We are {guests} and stay {nights} nights in {city}. Which hotel?",
          "I need rooms in {city} for {guests} people, {nights} nights."),
         ("I will search hotels in {city}.", "Looking for {nights} nights in {city}."),
         ("'{hotel}' in {city} with {stars} stars takes {guests} guests for {nights} "
          "nights at {price} euros.",
          "For {guests} guests and {nights} nights in {city}: '{hotel}', {stars} stars, "
          "{price} euros.")),
)
# fmt: on
VALUES |= {f"{kind}2": VALUES[kind] for kind in ("city", "currency", "team")}
