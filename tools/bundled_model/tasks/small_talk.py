"""Greetings, thanks, questions about Pebble itself, polite refusals, and recall of what the user said earlier."""

from random import Random

from ..turn import Turn
from .words import made_up_word

EXCHANGES: dict[str, tuple[tuple[str, ...], str]] = {
    "hello": (
        ("Hello!", "Hi!", "Hey!", "Hello there!", "Hi Pebble!", "Hello Pebble!", "Good day!"),
        "Hello! How can I help you?",
    ),
    "morning": (("Good morning!", "Good morning, Pebble!"), "Good morning! How can I help you?"),
    "evening": (("Good evening!", "Good evening, Pebble!"), "Good evening! How can I help you?"),
    "how": (
        (
            *("How are you?", "How are you today?", "How do you do?", "Are you well?"),
            *("How is it going?", "How's it going?"),
        ),
        "I am fine, thank you. What can I do for you?",
    ),
    "who": (
        (
            *("Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself."),
            "Can you introduce yourself?",
        ),
        "I am Pebble, a small language model that runs on your own computer.",
    ),
    "name": (
        ("What is your name?", "What's your name?", "Do you have a name?", "What are you called?"),
        "My name is Pebble.",
    ),
    "can": (
        (
            *("What can you do?", "What can you help me with?", "What do you know?"),
            *("How can you help me?", "help", "Help!"),
        ),
        "I can add, subtract, compare, count, sort, spell, tell short stories and answer questions about this toolkit.",
    ),
    "thanks": (
        (
            *("Thank you!", "Thanks!", "Thanks a lot!", "Thank you, Pebble!", "Many thanks!"),
            *("Great, thanks!", "That helps, thanks!"),
        ),
        "You are welcome!",
    ),
    "bye": (
        ("Goodbye!", "Bye!", "See you!", "See you later!", "Good night!", "Bye, Pebble!"),
        "Goodbye! Have a nice day.",
    ),
    "praise": (
        ("Well done!", "Good job!", "You are clever!", "Nice work!", "Great!", "Good answer!"),
        "Thank you, that is kind.",
    ),
    "robot": (
        ("Are you a robot?", "Are you human?", "Are you a person?", "Are you alive?", "Are you real?"),
        "No, I am a small computer program.",
    ),
    "size": (
        ("How big are you?", "How many parameters do you have?", "What is your size?", "Are you a big model?"),
        "I have about four million parameters, so I am very small.",
    ),
    "joke": (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny."),
        "Why did the token cross the road? To get to the next position.",
    ),
    "sad": (
        ("I am sad.", "I feel sad.", "I had a bad day.", "I am tired."),
        "I am sorry to hear that. Shall I tell you a story?",
    ),
    "happy": (("I am happy.", "I feel good today.", "I had a good day."), "That is good to hear!"),
    "ok": (("OK.", "I see.", "All right.", "Good.", "Fine."), "Is there anything else that I can do?"),
}

UNKNOWN_REPLY = "I do not know that. I am a small model."
LIMIT_REPLY = "I can only add and subtract numbers from 0 to 99."
UNKNOWN = (
    *("Who is the {office} of {place}?", "What is the capital of {place}?", "How many people live in {place}?"),
    *("What is the weather in {place}?", "How far is {place}?", "Tell me about the history of {place}."),
    *("What language do people speak in {place}?", "Where is {place}?", "How do I travel to {place}?"),
    *("Translate {noun} into {language}.", "Write a poem about {noun}.", "What is the meaning of {noun}?"),
    *("Who invented the {noun}?", "How much does a {noun} cost?", "How do I cook a {noun}?", "Why is the {noun} blue?"),
    *("What time is it?", "What is the date today?", "Write a program in {language}.", "Who won the match?"),
    *("What should I eat today?", "Which film should I watch?", "Can you book a flight?", "Send an email to my boss."),
)
PLACES = (
    *("France", "Japan", "Brazil", "Kenya", "India", "Spain", "Canada", "Egypt", "Peru", "Norway", "Berlin", "Paris"),
    *("London", "Tokyo", "Rome", "Cairo", "Lima", "Oslo", "Madrid", "Delhi", "China", "Italy", "Chile", "Mars"),
)
OFFICES = ("king", "president", "queen", "mayor", "prime minister", "leader")
NOUNS = "love sea car phone train sky whale pizza pancake bicycle clock piano rocket".split()
LANGUAGES = ("French", "German", "Latin", "Java", "Spanish", "Greek", "Rust")
OUT_OF_RANGE = (
    *("What is {a} {op} {b}?", "{a} {op} {b}", "{a}{op}{b}", "Calculate {a} {op} {b}."),
    "How much is {a} {op} {b}?",
)

NAMES = tuple(
    """
    Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karin Leo Maria Nina Oscar Paula Quinn Robert Sara Theo
    Uma Victor Wendy Xenia Yusuf Zoe Alice Boris Carlos Diana Elias Fatima George Hanna Igor Julia Kofi Linda
    Mateo Nora Omar Priya Rosa Samir Tina Ursula Vera Walter Yara Aisha Bruno Chen Dora Erik Frida Gita Helen
    Ivan Jana Kenji Lars Mona Niko Olga Peter Ruth Sven Tara Umar Viola Wanda Yoko Zara Adam Bella Cyril Dalia
    Edgar Flora Gloria Henry Irene Jacob Kira Lucas Marta Nelson Otto Pablo Rita Simon Tanja Hector Vivian Wilma
    Ravi Mei Lin Noah Ella Max Lily Jack Amir Sofia Pedro Ines
    """.split()
)
FAVOURITES = {
    "color": "red blue green yellow purple orange pink brown black white grey gold silver".split(),
    "animal": "cat dog horse rabbit tiger fox whale owl bear lion panda frog duck".split(),
    "food": "soup bread rice pasta cake salad cheese pizza honey corn fish beans toast".split(),
}
TELL_NAME = ("My name is {x}.", "I am {x}.", "Hi, I'm {x}.", "Hello, my name is {x}.", "Call me {x}.", "my name is {x}")
ASK_NAME = (
    *("What is my name?", "Do you remember my name?", "What's my name?", "Who am I?"),
    *("Tell me my name.", "what is my name"),
)
TELL_FAVOURITE = (
    "My favorite {kind} is {x}.",
    "My favourite {kind} is {x}.",
    "I like {x} best, it is my favorite {kind}.",
)
ASK_FAVOURITE = (
    *("What is my favorite {kind}?", "What is my favourite {kind}?", "Do you remember my favorite {kind}?"),
    *("Which {kind} do I like best?", "Tell me my favorite {kind}."),
)
UNTOLD_NAME_REPLY = "You have not told me your name."
UNTOLD_FAVOURITE_REPLY = "You have not told me your favorite {kind}."


def chat(rng: Random) -> Turn:
    """Return a greeting, thanks, or a question about Pebble."""
    name = rng.choice(tuple(EXCHANGES))
    questions, reply = EXCHANGES[name]
    return Turn(rng.choice(questions), reply)


def unknown(rng: Random) -> Turn:
    """Return a question outside the model's knowledge."""
    question = rng.choice(UNKNOWN).format(
        place=rng.choice(PLACES), office=rng.choice(OFFICES), noun=rng.choice(NOUNS), language=rng.choice(LANGUAGES)
    )
    return Turn(question, UNKNOWN_REPLY)


def out_of_range(rng: Random) -> Turn:
    """Return a question with numbers that are too big, or with operations that are not learned."""
    if rng.random() < 0.5:
        operation = rng.choice(("*", "x", "/", "times", "divided by"))
        a, b = rng.randrange(1, 100), rng.randrange(1, 100)
    else:
        operation = rng.choice(("+", "-", "plus", "minus"))
        a, b = rng.randrange(100, 10_000), rng.randrange(1, 10_000)
        if rng.random() < 0.5:
            a, b = b, a
    phrasing = rng.choice([p for p in OUT_OF_RANGE if operation in "+-*/" or "}{" not in p])
    return Turn(phrasing.format(a=a, op=operation, b=b), LIMIT_REPLY)


def tell_and_ask_name(rng: Random, made_up_share: float = 0.6) -> tuple[Turn, Turn]:
    """Return a turn in which the user tells a name, and a later one that asks for it. The key is the name.

    Made-up names teach the model to repeat the name in the text instead of one that it has memorised.
    """
    name = made_up_word(rng).capitalize() if rng.random() < made_up_share else rng.choice(NAMES)
    key = f"name:{name}"
    told = Turn(rng.choice(TELL_NAME).format(x=name), f"Nice to meet you, {name}!", key)
    return told, Turn(rng.choice(ASK_NAME), f"Your name is {name}.", key, expected=name, match="contains")


def tell_and_ask_favourite(rng: Random, made_up_share: float = 0.4) -> tuple[Turn, Turn]:
    """Return turns that tell and ask for a favourite colour, animal or food. The key is the thing."""
    kind = rng.choice(tuple(FAVOURITES))
    thing = made_up_word(rng) if rng.random() < made_up_share else rng.choice(FAVOURITES[kind])
    key = f"favorite:{kind},{thing}"
    told = Turn(rng.choice(TELL_FAVOURITE).format(kind=kind, x=thing), f"I will remember that: {thing}.", key)
    asked = rng.choice(ASK_FAVOURITE).format(kind=kind)
    return told, Turn(asked, f"Your favorite {kind} is {thing}.", key, expected=thing, match="contains")


def untold(rng: Random) -> Turn:
    """Return a question about something the user has not told; only right in a conversation without it."""
    if rng.random() < 0.6:
        return Turn(rng.choice(ASK_NAME), UNTOLD_NAME_REPLY)
    kind = rng.choice(tuple(FAVOURITES))
    return Turn(rng.choice(ASK_FAVOURITE).format(kind=kind), UNTOLD_FAVOURITE_REPLY.format(kind=kind))
