"""What scene `chat` talks about: facts, advice, instructions, choices and small talk."""

# Packed by hand: the formatter would give every sentence a line of its own.
# fmt: off
# Subject -> short true sentences about it.
FACTS = {
    "cats": (
        "Cats sleep for most of the day.", "They clean their fur with a rough tongue.",
        "Their whiskers help them feel in the dark.", "A cat can jump several times its height.",
    ),
    "dogs": (
        "Dogs were tamed many thousands of years ago.", "They smell far better than we do.",
        "A dog shows its mood with its tail.", "They learn many words and signs.",
    ),
    "bees": (
        "Bees live in large groups around one queen.",
        "They make honey from the nectar of flowers.",
        "A bee dances to show the others where food is.", "Many fruits need bees to grow.",
    ),
    "whales": (
        "Whales are mammals and breathe air.", "The blue whale is the largest animal of all.",
        "They talk with long, low songs.", "Many of them travel far each year.",
    ),
    "owls": (
        "Owls hunt at night.", "Their soft feathers make almost no sound.",
        "They can turn the head very far around.", "Most of them eat mice and insects.",
    ),
    "penguins": (
        "Penguins are birds that swim but do not fly.", "They live in the south of the world.",
        "Parents share the care for the egg.", "Thick fat keeps them warm.",
    ),
    "elephants": (
        "Elephants are the largest animals on land.", "They use the trunk to drink and to grab.",
        "A herd is led by an old female.", "They remember places for many years.",
    ),
    "spiders": (
        "Spiders have eight legs.", "Most of them make silk.", "They eat insects and so help us.",
        "Only a few are dangerous to people.",
    ),
    "trees": (
        "Trees take in carbon dioxide and give off oxygen.",
        "A ring in the wood tells of one year.", "Roots hold the soil and take up water.",
        "Some trees live for thousands of years.",
    ),
    "bread": (
        "Bread is made of flour, water and salt.", "Yeast makes the dough rise.",
        "The crust turns brown in the heat.", "People have baked it since very old times.",
    ),
    "coffee": (
        "Coffee is made from roasted seeds.", "The plant grows in warm countries.",
        "Caffeine makes people feel awake.", "Too much of it can disturb your sleep.",
    ),
    "tea": (
        "Tea comes from the leaves of one plant.",
        "Green and black tea differ in how they are dried.", "Hot water brings out the taste.",
        "It is drunk all over the world.",
    ),
    "chocolate": (
        "Chocolate is made from cocoa beans.", "The beans are dried and roasted.",
        "Dark chocolate has less sugar.", "It melts near the warmth of the body.",
    ),
    "salt": (
        "Salt is found in the sea and in the ground.", "Our body needs a little of it.",
        "It keeps food fresh for longer.", "Salty water freezes at a lower temperature.",
    ),
    "the moon": (
        "The moon goes around the earth in about a month.", "It shines with light from the sun.",
        "It causes the tides of the sea.", "We always see the same side.",
    ),
    "the sun": (
        "The sun is a star.", "Its light needs about eight minutes to reach us.",
        "It is mostly hydrogen and helium.", "Without it there would be no life here.",
    ),
    "Mars": (
        "Mars is a small red planet.", "A day there is a little longer than ours.",
        "It has two tiny moons.", "Robots drive around on its ground.",
    ),
    "Jupiter": (
        "Jupiter is the largest planet.", "Its red spot is a huge storm.", "It has many moons.",
        "It is made mostly of gas.",
    ),
    "rain": (
        "Rain falls when drops in a cloud grow heavy.", "The water comes from seas and lakes.",
        "Plants and rivers depend on it.", "Very fine rain is called drizzle.",
    ),
    "snow": (
        "Snow is made of small ice crystals.", "Most flakes have six sides.",
        "Fresh snow swallows sound.", "It keeps the ground below from freezing hard.",
    ),
    "rainbows": (
        "A rainbow appears when sun shines on drops.", "The light is split into its colors.",
        "Red is on the outside.", "You must stand with the sun behind you.",
    ),
    "volcanoes": (
        "A volcano is an opening in the crust of the earth.", "Hot melted rock comes out as lava.",
        "The ash makes soil fertile.", "Many lie around the Pacific.",
    ),
    "rivers": (
        "Rivers carry water from hills to the sea.", "They shape valleys over a long time.",
        "Many old cities stand on a river.", "Their speed depends on the slope.",
    ),
    "deserts": (
        "A desert gets very little rain.", "Nights there can be cold.",
        "Plants store water in thick leaves.", "Not all deserts are hot.",
    ),
    "iron": (
        "Iron is a strong metal.", "It rusts in wet air.", "Steel is iron with a little carbon.",
        "Magnets pull it.",
    ),
    "gold": (
        "Gold is soft and heavy.", "It does not rust.", "People use it for rings and coins.",
        "It also carries current well.",
    ),
    "glass": (
        "Glass is made from sand.", "It is melted and then shaped.",
        "It can be used again and again.", "Colors come from small amounts of metal.",
    ),
    "paper": (
        "Paper is made from the fibers of plants.", "It was invented in China.",
        "Old paper can be made into new paper.", "A sheet is hard to fold more than seven times.",
    ),
    "bicycles": (
        "A bicycle needs no fuel.", "Its gears make hills easier.",
        "Riding is good for the heart.", "Tires full of air make it smooth.",
    ),
    "trains": (
        "Trains run on steel rails.", "They carry many people with little energy.",
        "Fast ones go over three hundred kilometers per hour.", "The first ones used steam.",
    ),
    "computers": (
        "A computer follows a list of instructions.", "It stores everything as ones and zeros.",
        "The first ones filled whole rooms.", "Today one fits in a pocket.",
    ),
    "maps": (
        "A map shows the world from above.", "Its scale tells how much it shrinks.",
        "North is mostly at the top.", "Old maps often had empty places.",
    ),
    "music": (
        "Music is made of tones and rhythm.", "It can change how we feel.",
        "Every people on earth has it.", "Learning it trains memory and patience.",
    ),
    "chess": (
        "Chess is a game for two.", "Each side has sixteen pieces.", "The king must be protected.",
        "There are more games than anyone can count.",
    ),
    "football": (
        "Football is played by two teams of eleven.", "Only the keeper may use the hands.",
        "A match takes ninety minutes.", "It needs little more than a ball.",
    ),
    "sleep": (
        "Sleep lets the body recover.", "The brain sorts memories at night.",
        "Adults need about eight hours.", "A dark and cool room helps.",
    ),
    "the heart": (
        "The heart pumps blood through the body.", "It beats about seventy times a minute.",
        "It has four chambers.", "Sport makes it stronger.",
    ),
    "bones": (
        "Bones hold the body up.", "An adult has a little over two hundred.",
        "They make new blood cells.", "Milk and movement keep them strong.",
    ),
    "Paris": (
        "Paris lies on the Seine.", "It is the capital of France.",
        "The Eiffel Tower is its best known sight.", "It has many museums.",
    ),
    "Rome": (
        "Rome is the capital of Italy.", "It is more than two thousand years old.",
        "The Colosseum stands in its center.", "The Tiber flows through it.",
    ),
    "Cairo": (
        "Cairo is the capital of Egypt.", "It lies on the Nile.", "The pyramids are close by.",
        "Millions of people live there.",
    ),
    "Tokyo": (
        "Tokyo is the capital of Japan.", "It is one of the largest cities.",
        "Its trains are famous for being on time.", "Cherry trees bloom there in spring.",
    ),
    "magnets": (
        "A magnet has two poles.", "Equal poles push each other away.",
        "The earth itself is a large magnet.", "A compass needle is a small one.",
    ),
    "ice": (
        "Ice is frozen water.", "It floats because it is lighter than water.",
        "It melts at zero degrees.", "Salt makes it melt sooner.",
    ),
    "clouds": (
        "Clouds are made of tiny drops.", "They form when air cools.",
        "White ones bring fair weather.", "Dark ones often bring rain.",
    ),
    "frogs": (
        "Frogs live in water and on land.", "They begin life as tadpoles.",
        "Their skin takes in water.", "They catch flies with a sticky tongue.",
    ),
    "apples": (
        "Apples grow on trees in cool lands.", "There are thousands of sorts.",
        "They keep for months in a cool place.", "Most of them ripen in autumn.",
    ),
    "rice": (
        "Rice feeds about half of mankind.", "It grows in wet fields.",
        "It must be cooked in water.", "There are long and short grains.",
    ),
    "robots": (
        "Robots are machines that act on their own.", "Many of them build cars.",
        "They use sensors to feel the world.", "They do not get tired.",
    ),
    "batteries": (
        "A battery stores energy in chemicals.", "It has a plus and a minus side.",
        "Some can be charged many times.", "Cold makes them weaker.",
    ),
}

# Trouble (as a user says it) -> tips.
ADVICE = {
    "I cannot sleep": (
        "go to bed at the same time every day", "put the phone away an hour before",
        "keep the room cool and dark", "drink no coffee after noon", "read a calm book",
    ),
    "I am nervous about my exam": (
        "make a plan for each day", "explain the subject to a friend", "take short breaks",
        "sleep well the night before", "start with old tests",
    ),
    "my plants keep dying": (
        "check the soil before you water", "move them nearer to the window",
        "use a pot with a hole", "keep them out of cold wind", "feed them in spring",
    ),
    "I want to save money": (
        "write down what you spend", "cook at home more often",
        "put money aside on the first day of the month", "wait a day before you buy",
        "cancel what you do not use",
    ),
    "I am always late": (
        "set two alarms", "pack your bag in the evening", "leave ten minutes early",
        "put your keys in one place", "plan fewer things per day",
    ),
    "I want to eat better": (
        "fill half the plate with vegetables", "drink water with every meal",
        "plan the week ahead", "keep fruit on the table", "eat slowly",
    ),
    "I feel lonely": (
        "call an old friend", "join a club near you", "help at a local event", "take a class",
        "talk to your neighbors",
    ),
    "my desk is a mess": (
        "throw away old paper", "give every thing a place", "clean it each Friday",
        "use small boxes", "keep only what you need",
    ),
    "I want to learn a language": (
        "practice ten minutes every day", "listen to songs in it", "speak from the first week",
        "write small notes", "watch films with subtitles",
    ),
    "I want to run a race": (
        "start slowly", "run three times a week", "get good shoes", "rest when something hurts",
        "find someone to run with",
    ),
    "I forget names": (
        "repeat the name aloud", "link it to a picture", "write it down later",
        "ask again without shame", "use it when you say goodbye",
    ),
    "my computer is slow": (
        "restart it", "close programs you do not need", "free some disk space", "install updates",
        "look for programs that start on their own",
    ),
    "I have a headache": (
        "drink a glass of water", "rest in a dark room", "open a window",
        "look away from the screen", "see a doctor if it stays",
    ),
    "I want to read more": (
        "carry a book with you", "read ten pages before bed", "stop books that bore you",
        "visit the library", "join a reading group",
    ),
    "I argue with my brother": (
        "listen before you answer", "say what you feel", "take a walk first",
        "look for one thing you agree on", "say sorry when you were wrong",
    ),
    "I am bored at home": (
        "cook something new", "call a friend", "learn a card trick", "go for a walk",
        "draw what you see from the window",
    ),
    "I must give a speech": (
        "practice it aloud", "know your first sentence by heart", "speak slowly",
        "look at friendly faces", "use only a few notes",
    ),
    "my garden has no flowers": (
        "plant seeds in spring", "choose plants for your soil", "remove the weeds",
        "water in the evening", "leave room for bees",
    ),
    "I want to get up earlier": (
        "go to bed earlier", "put the alarm far from the bed", "let in light at once",
        "plan a good breakfast", "change it by small steps",
    ),
    "I worry too much": (
        "write your thoughts down", "talk to someone you trust", "breathe slowly",
        "move your body", "do one small thing at a time",
    ),
    "my bread is too hard": (
        "use more water", "let the dough rest longer", "bake it at more heat for less time",
        "put a bowl of water in the oven", "cover it while it cools",
    ),
    "I moved to a new city": (
        "walk through every quarter", "learn the bus lines", "greet your neighbors",
        "find a place you like for coffee", "join a sports club",
    ),
    "I want to draw better": (
        "draw a little each day", "look longer than you draw", "start with simple shapes",
        "copy pictures you like", "keep your old pages",
    ),
    "my bike makes noises": (
        "oil the chain", "check the brakes", "tighten the screws", "pump up the tires",
        "take it to a shop if it stays",
    ),
}

# Task -> ordered steps.
HOWTO = {
    "make tea": (
        "boil fresh water", "put the leaves in a pot", "pour the water over them",
        "wait three minutes", "take the leaves out",
    ),
    "boil an egg": (
        "bring water to a boil", "lower the egg in with a spoon", "wait six to ten minutes",
        "cool it under cold water",
    ),
    "plant a tree": (
        "dig a wide hole", "set the tree in upright", "fill in the soil", "press it down gently",
        "give it plenty of water",
    ),
    "bake bread": (
        "mix flour, water, salt and yeast", "knead the dough", "let it rise for an hour",
        "shape a loaf", "bake it until it is brown",
    ),
    "wash a sweater": (
        "fill a bowl with cool water", "add a little soap", "press the wool softly",
        "rinse it well", "dry it flat on a towel",
    ),
    "change a tire": (
        "stop in a safe place", "loosen the nuts", "lift the car", "swap the wheels",
        "tighten the nuts again",
    ),
    "write a letter": (
        "put the date at the top", "greet the reader", "say why you write", "end with kind words",
        "sign your name",
    ),
    "paint a wall": (
        "cover the floor", "clean the wall", "paint the edges first", "roll on the paint",
        "let it dry before a second coat",
    ),
    "cook pasta": (
        "boil a lot of water", "add salt", "put the pasta in", "stir now and then",
        "pour off the water when it is firm",
    ),
    "clean a window": (
        "wipe off the dust", "wash it with warm water", "pull the water down",
        "dry the edges with a cloth",
    ),
    "build a fire": (
        "clear the ground", "lay dry grass in the middle", "set small sticks around it",
        "light it from below", "add thicker wood slowly",
    ),
    "fold a paper plane": (
        "fold the sheet along its length", "open it again", "bend two corners to the middle",
        "fold the sides down", "throw it gently",
    ),
    "make a salad": (
        "wash the leaves", "cut the vegetables", "mix oil, vinegar and salt", "pour it over",
        "toss everything",
    ),
    "learn a poem": (
        "read it aloud twice", "learn one line at a time", "cover the text and try",
        "repeat it before bed",
    ),
    "pack a suitcase": (
        "write a list", "roll your clothes", "put heavy things at the bottom",
        "keep papers in your bag", "leave some space",
    ),
    "grow tomatoes": (
        "sow the seeds inside", "move them to larger pots", "bring them out after the frost",
        "tie them to a stick", "water them every day",
    ),
    "repair a sock": (
        "find thread of the same color", "pull the sock over a ball", "sew along the hole",
        "weave across it", "cut off the end",
    ),
    "take a good photo": (
        "look for soft light", "come close", "hold the camera still", "focus on the eyes",
        "take more than one",
    ),
    "wash your hands": (
        "wet your hands", "take soap", "rub for twenty seconds", "rinse them",
        "dry them with a clean towel",
    ),
    "choose a gift": (
        "think of what the person likes", "set a limit for the price", "ask a friend",
        "wrap it nicely", "add a short note",
    ),
}

# Two choices -> what speaks for each.
CHOICES = {
    ("tea", "coffee"): (
        ("it is gentle", "there are many kinds", "it calms me"),
        ("it wakes you up", "it smells wonderful", "it goes well with cake"),
    ),
    ("cats", "dogs"): (
        ("they are quiet", "they look after themselves", "they purr"),
        ("they are loyal", "they love walks", "they are always glad to see you"),
    ),
    ("the sea", "the mountains"): (
        ("you can swim", "the air is salty and fresh", "the sound is calming"),
        ("the view is wide", "the paths are quiet", "the air is clear"),
    ),
    ("books", "films"): (
        ("you make your own pictures", "they last longer", "you can read anywhere"),
        ("you can watch them together", "the music is part of it", "they take one evening"),
    ),
    ("summer", "winter"): (
        ("the days are long", "you can eat outside", "the fruit is ripe"),
        ("snow is beautiful", "it is cozy inside", "you can skate"),
    ),
    ("the city", "the village"): (
        ("there is always something to do", "the ways are short", "you meet new people"),
        ("it is quiet", "you know your neighbors", "you see the stars"),
    ),
    ("trains", "cars"): (
        ("you can read on the way", "there is no traffic", "they are kind to the air"),
        ("you leave when you like", "you can carry a lot", "they go everywhere"),
    ),
    ("morning", "evening"): (
        ("the head is clear", "the streets are empty", "the light is fresh"),
        ("the work is done", "friends have time", "the sky is red"),
    ),
    ("pizza", "soup"): (
        ("everyone likes it", "you can choose what is on it", "it is fun to share"),
        ("it warms you", "it is light", "it uses what you have"),
    ),
    ("football", "tennis"): (
        ("you play in a team", "you need only a ball", "it is fast"),
        ("you need just one partner", "it trains the eye", "you can play when old"),
    ),
    ("paper", "a screen"): (
        ("it needs no power", "you can draw on it", "it is easy on the eyes"),
        ("you can search in it", "it weighs little", "you can correct mistakes"),
    ),
    ("apples", "oranges"): (
        ("they keep for months", "you need no knife", "there are sweet and sour ones"),
        ("they are full of juice", "they smell fresh", "they are good in winter"),
    ),
    ("painting", "music"): (
        ("the result stays", "you can do it in silence", "every color is allowed"),
        ("it moves the body", "you can make it together", "it needs no words"),
    ),
    ("walking", "cycling"): (
        ("you see more", "you need nothing", "you can talk"),
        ("you get further", "the wind is nice", "it is easy on the knees"),
    ),
    ("rain", "sun"): (
        ("the air is clean", "the garden drinks", "reading inside is lovely"),
        ("everyone smiles", "the clothes dry", "the day feels longer"),
    ),
    ("rice", "potatoes"): (
        ("it keeps for years", "it goes with everything", "it cooks quickly"),
        ("they grow here", "you can fry or boil them", "they fill you up"),
    ),
}

GREETINGS = (
    "Hello", "Hi", "Good morning", "Good evening", "Hey", "Hi there", "Hello there", "Good day",
)
PLACES = (
    "the park", "the lake", "the market", "the museum", "the beach", "the library", "the forest",
    "a cafe", "the zoo", "the cinema", "the pool", "the old town",
)
FRIENDS = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jonas", "Kira",
    "Leo", "Mona", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Vera", "my_sister",
    "my_brother", "my_mother", "my_father", "a_friend", "my_aunt",
)

# Activity -> what to take care of.
ACTIVITIES = {
    "swimming": "take a towel and something to drink",
    "hiking": "wear good shoes and start early",
    "painting": "bring old clothes and a big sheet",
    "cooking": "buy everything the day before",
    "reading": "find a quiet corner",
    "cycling": "check the brakes first",
    "singing": "warm up your voice",
    "dancing": "choose music you both like",
    "gardening": "wear gloves and a hat",
    "skating": "go when it is not crowded",
    "camping": "take a lamp and a warm blanket",
    "fishing": "bring patience and a chair",
    "baking": "heat the oven in time",
    "sailing": "look at the wind first",
    "climbing": "never go alone",
    "drawing": "begin with simple shapes",
}

# Feeling -> what to say first.
FEELINGS = {
    "tired": "Rest is not a luxury",
    "happy": "That is lovely to hear",
    "sad": "I am sorry to hear that",
    "excited": "That sounds like fun",
    "angry": "That is a hard feeling",
    "proud": "You can be",
    "bored": "That happens to everyone",
    "worried": "I understand that",
    "calm": "Enjoy the moment",
    "curious": "That is a good start",
    "hungry": "Then it is time for a meal",
    "confused": "Let us sort it out",
}

# Feeling -> what may have caused it.
REASONS = {
    "tired": (
        "I worked all night", "the baby cried", "I walked twenty kilometers", "I slept badly",
    ),
    "happy": ("I passed my test", "my friend came back", "the sun is out", "I got a letter"),
    "sad": ("my friend moved away", "it rained on my party", "I lost my book", "our team lost"),
    "excited": ("I travel tomorrow", "we get a dog", "the concert is tonight", "it may snow"),
    "angry": ("my bike was stolen", "nobody listened", "the bus left early", "they were unfair"),
    "proud": (
        "I finished my model", "my daughter can swim", "I ran ten kilometers", "we won the match",
    ),
    "bored": (
        "nothing is on", "all my friends are away", "the game is over", "I have read everything",
    ),
    "worried": (
        "my cat is ill", "the test is near", "I have heard nothing from her", "the storm is close",
    ),
    "calm": ("the lake is still", "my work is done", "I drank some tea", "the house is quiet"),
    "curious": ("I found an old key", "there is a new shop", "I saw a strange bird", "I got a box"),
    "hungry": ("I missed lunch", "it smells of bread", "I swam for an hour", "the fridge is empty"),
    "confused": (
        "the map is wrong", "both clocks differ", "the letter has no name", "there are two doors",
    ),
}
# fmt: on
