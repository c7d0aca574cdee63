"""Word lists of the generated Python functions."""

# Plural, singular, numeric fields, text fields, flag fields.
RECORDS = (
    ("orders", "order", ("price", "quantity", "weight"), ("city", "status"), ("paid", "urgent")),
    ("parcels", "parcel", ("weight", "volume", "cost"), ("zone", "sender"), ("fragile", "sent")),
    ("students", "student", ("score", "age", "credits"), ("name", "course"), ("active", "new")),
    ("books", "book", ("pages", "copies", "price"), ("title", "author"), ("borrowed", "rare")),
    ("jobs", "job", ("duration", "priority", "cost"), ("queue", "owner"), ("done", "failed")),
    ("players", "player", ("points", "level", "wins"), ("team", "name"), ("ready", "banned")),
    ("tickets", "ticket", ("price", "row", "seat"), ("event", "holder"), ("used", "refunded")),
    ("rooms", "room", ("area", "beds", "floor"), ("kind", "building"), ("free", "clean")),
    ("cars", "car", ("speed", "mileage", "doors"), ("brand", "color"), ("electric", "sold")),
    ("trips", "trip", ("distance", "fare", "minutes"), ("origin", "driver"), ("shared", "late")),
    ("sensors", "sensor", ("value", "voltage", "age"), ("site", "unit"), ("online", "faulty")),
    ("events", "event", ("size", "delay", "count"), ("source", "kind"), ("handled", "public")),
    ("files", "file", ("size", "lines", "version"), ("path", "suffix"), ("hidden", "locked")),
    ("users", "user", ("age", "visits", "balance"), ("name", "country"), ("admin", "verified")),
    ("plants", "plant", ("height", "leaves", "age"), ("species", "bed"), ("watered", "indoor")),
    ("meals", "meal", ("calories", "price", "portions"), ("cook", "menu"), ("vegan", "hot")),
    ("boats", "boat", ("length", "crew", "draft"), ("harbor", "flag"), ("docked", "rented")),
    ("songs", "song", ("plays", "seconds", "rating"), ("artist", "genre"), ("live", "liked")),
    ("loans", "loan", ("amount", "rate", "months"), ("bank", "client"), ("open", "secured")),
    ("shifts", "shift", ("hours", "wage", "breaks"), ("worker", "place"), ("night", "covered")),
    ("claims", "claim", ("amount", "days", "level"), ("agent", "region"), ("valid", "closed")),
    ("cells", "cell", ("mass", "charge", "area"), ("layer", "label"), ("alive", "marked")),
    ("routes", "route", ("length", "toll", "stops"), ("start", "carrier"), ("scenic", "blocked")),
    ("tasks", "task", ("effort", "rank", "retries"), ("group", "owner"), ("ready", "skipped")),
)
NUMBERS = (
    ("values", "value"), ("scores", "score"), ("prices", "price"), ("weights", "weight"),
    ("ages", "age"), ("heights", "height"), ("samples", "sample"), ("readings", "reading"),
    ("lengths", "length"), ("costs", "cost"), ("distances", "distance"), ("marks", "mark"),
    ("sizes", "size"), ("delays", "delay"), ("counts", "count"), ("levels", "level"),
    ("ratings", "rating"), ("offsets", "offset"), ("totals", "amount"), ("steps", "step"),
)  # fmt: skip
STRINGS = (
    ("words", "word"), ("names", "name"), ("lines", "line"), ("tags", "tag"), ("titles", "title"),
    ("labels", "label"), ("keys", "key"), ("paths", "path"), ("cities", "city"),
    ("tokens", "token"), ("codes", "code"), ("parts", "part"), ("notes", "note"),
    ("rows", "row"), ("emails", "email"), ("messages", "message"), ("entries", "entry"),
)  # fmt: skip
MAPPINGS = (
    ("stock", "item", "amount"), ("prices", "product", "price"), ("votes", "person", "count"),
    ("scores", "player", "score"), ("limits", "name", "limit"), ("weights", "part", "weight"),
    ("budget", "team", "money"), ("distances", "town", "distance"), ("grades", "student", "grade"),
    ("ages", "name", "age"), ("totals", "region", "total"), ("hits", "page", "hits"),
)  # fmt: skip
TEXT_ARGS = ("text", "line", "source", "message", "raw", "content", "record", "data")
GRADES = (
    ("low", "medium", "high"), ("small", "middle", "large"), ("cold", "warm", "hot"),
    ("slow", "normal", "fast"), ("weak", "fair", "strong"), ("short", "average", "long"),
    ("poor", "good", "great"), ("light", "solid", "heavy"), ("idle", "busy", "full"),
    ("cheap", "fair", "costly"), ("young", "adult", "old"), ("empty", "partial", "complete"),
)  # fmt: skip
FINAL_NAMES = {
    "records": ("select", "pick", "choose", "filter", "prepare"),
    "numbers": ("adjust", "scale", "collect", "clean", "convert"),
    "strings": ("list", "format", "tidy", "gather", "extract"),
    "mapping": ("group", "index", "summarize", "count", "tally"),
    "number": ("total", "measure", "compute", "rate", "estimate"),
    "string": ("describe", "label", "report", "render", "name"),
}
PREFIXES = ("new", "old", "tmp", "x", "id", "no", "my", "pre", "re", "un", "ab", "key")
SEPARATORS = (", ", "; ", " | ", "-", "/", ":", " ", "_")
