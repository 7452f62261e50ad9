"""Facts about the project, its commands, their options and the Python API."""

from .fact import Fact

PROJECT = (
    Fact(
        "It is a Python toolkit that runs language models from ONNX graphs on your own computer.",
        things=("this toolkit", "this project", "the genai toolkit", "genai"),
        questions=("What does this toolkit do?", "What is this software for?", "What am I using here?"),
    ),
    Fact(
        "The toolkit is under the MIT license.",
        things=("the license", "the licence", "the license of this toolkit"),
        questions=(
            "Is it open source?",
            "Which license does it have?",
            "May I use it at work?",
            "Is the toolkit free?",
        ),
    ),
    Fact(
        "There is no telemetry: nothing leaves your computer.",
        things=("the telemetry",),
        questions=(
            *("Does it send data?", "Is there telemetry?", "Do you send my data anywhere?", "Is my chat private?"),
            *("Does it phone home?", "Does the toolkit collect data?", "Do you spy on me?"),
        ),
    ),
    Fact(
        "Make a virtual environment and run pip install in the project folder.",
        actions=("install the toolkit", "install this", "install genai", "set it up"),
    ),
    Fact(
        "It needs Python 3.11 or newer.",
        things=("the Python version",),
        questions=(
            *("Which Python do I need?", "Which Python version does it need?", "What Python version is required?"),
            *("Does it run on Python 3.12?", "Which version of Python works?"),
        ),
    ),
    Fact(
        "No, it runs on the CPU. A GPU is optional.",
        questions=(
            *("Do I need a GPU?", "Does it need a graphics card?", "Can it run without a GPU?", "Is a GPU required?"),
            *("Does it run on the CPU?", "Do I need special hardware?", "Can I use it on a laptop?"),
        ),
    ),
    Fact(
        "No, it works without the internet.",
        questions=(
            *("Do I need the internet?", "Does it work offline?", "Can I use it offline?", "Is the internet needed?"),
            *("Do you need a network?", "Does it download anything?", "Are you online?"),
        ),
    ),
    Fact(
        "I run inside the toolkit: a small Llama model with four-bit weights.",
        things=("Pebble", "the bundled model", "the pebble model", "your model"),
        questions=("Which model are you?", "What kind of model are you?", "What is your architecture?"),
    ),
    Fact(
        "I was trained on text made by a program in this project.",
        things=("your training data",),
        questions=(
            *("How were you trained?", "Where does your knowledge come from?", "What were you trained on?"),
            *("Who made you?", "Who trained you?", "Which data were you trained on?"),
        ),
    ),
)

COMMANDS = (
    Fact(
        "genai chat opens a chat with a model in the terminal.",
        things=("genai chat", "the chat command"),
        actions=("start a chat", "chat with a model", "talk to a model", "open a chat"),
    ),
    Fact(
        "genai generate continues a prompt and prints the text.",
        things=("genai generate", "the generate command"),
        actions=("continue a prompt", "generate text", "complete a text"),
    ),
    Fact(
        "genai info shows what is inside a model folder.",
        things=("genai info", "the info command"),
        actions=("look at a model folder", "see what is inside a model", "inspect a model"),
    ),
    Fact(
        "genai bench measures speed: genai bench decode or genai bench prefill.",
        things=("genai bench", "the bench command"),
        actions=("measure speed", "benchmark a model", "see how fast a model is"),
    ),
    Fact(
        "genai bench decode measures how many new tokens per second a model makes.",
        things=("genai bench decode",),
        actions=("measure decode speed", "measure the decode speed", "benchmark decode", "time the decode step"),
    ),
    Fact(
        "genai bench prefill measures how many prompt tokens per second a model reads.",
        things=("genai bench prefill",),
        actions=("measure prefill speed", "measure the prefill speed", "benchmark prefill", "time the prompt"),
    ),
    Fact(
        "genai eval tasks measures how many held-out questions a model answers right.",
        things=("genai eval tasks", "genai eval", "the eval command"),
        actions=("measure accuracy", "evaluate a model", "test how good a model is"),
    ),
    Fact(
        "genai doctor checks your machine and says what to fix.",
        things=("genai doctor", "the doctor command"),
        actions=("check my machine", "find out what is wrong", "check my setup"),
    ),
    Fact(
        "genai build turns a checkpoint into an ONNX model folder.",
        things=("genai build", "the build command"),
        actions=("build a model", "convert a checkpoint", "make an ONNX model folder"),
    ),
    Fact(
        "genai run runs any ONNX model on arrays.",
        things=("genai run", "the run command"),
        actions=("run any ONNX model", "run an ONNX file", "run a model that is not a decoder"),
    ),
    Fact(
        "The commands are chat, generate, info, bench, eval, doctor, build and run.",
        things=("the list of commands",),
        actions=("list all commands",),
        questions=("Which commands are there?", "What commands do you have?", "Which commands does genai have?"),
    ),
    Fact(
        "Add --help to any command to see its options.",
        actions=("get help for a command", "see the options", "find the options of a command", "read the help"),
        questions=("Where is the help?", "Which options does a command have?"),
    ),
)

OPTIONS = (
    Fact(
        "Use -t or --threads, for example: genai chat -t 4.",
        things=("the threads option", "the -t option"),
        actions=("set the number of threads", "set threads", "use more threads", "use four threads"),
    ),
    Fact(
        "Use -n, for example: genai generate -n 100.",
        things=("the -n option",),
        actions=(
            "set the number of new tokens",
            "limit the length of the reply",
            "set max tokens",
            "get longer replies",
        ),
    ),
    Fact(
        "Use --seed with a number: the same seed gives the same text.",
        things=("the seed option", "a seed", "--seed"),
        actions=("set the seed", "get the same text again", "make sampling repeatable"),
    ),
    Fact(
        'Use -s with your text, for example: genai chat -s "Be brief."',
        things=("the -s option",),
        actions=("set the system prompt", "give a system prompt", "set a system message", "change the system prompt"),
    ),
    Fact(
        "Use -c with a number of tokens, for example: genai chat -c 512.",
        things=("the -c option",),
        actions=("set the context size", "change the context size", "set the context length", "limit the context"),
    ),
    Fact(
        'Use -p, for example: genai chat -p "Hello!"',
        things=("the -p option",),
        actions=(
            "ask one question only",
            "give a prompt on the command line",
            "pass a prompt",
            "chat without the terminal",
        ),
    ),
    Fact(
        "Use --stats to print speed and peak memory.",
        things=("the stats option", "--stats"),
        actions=("see the statistics", "see how much memory is used", "print the speed", "print the peak memory"),
    ),
    Fact(
        "Use --temperature, for example: --temperature 0.7.",
        things=("the temperature option",),
        actions=("set the temperature", "change the temperature", "get more varied text", "make replies more random"),
    ),
    Fact(
        "Press Ctrl-C: the reply stops and the chat goes on.",
        things=("Ctrl-C",),
        actions=("stop a reply", "interrupt a reply", "stop you from talking", "stop the text"),
        questions=("What does Ctrl-C do?", "What happens when I press Ctrl-C?"),
    ),
    Fact(
        "Exit code 0 means that all went well.",
        things=("exit code 0", "exit code zero"),
        questions=("What does exit code 0 mean?", "Which exit code means success?", "What does return code 0 mean?"),
    ),
    Fact(
        "Exit code 1 means that the command failed with an error.",
        things=("exit code 1", "exit code one"),
        questions=("What does exit code 1 mean?", "Which exit code means an error?", "What does return code 1 mean?"),
    ),
    Fact(
        "Exit code 2 means that the command line was wrong.",
        things=("exit code 2", "exit code two"),
        questions=(
            "What does exit code 2 mean?",
            "Which exit code means wrong usage?",
            "What does return code 2 mean?",
        ),
    ),
    Fact(
        "Exit code 130 means that you stopped it with Ctrl-C.",
        things=("exit code 130",),
        questions=(
            *("What does exit code 130 mean?", "Which exit code means interrupted?", "What does return code 130 mean?"),
            "Which exit code does Ctrl-C give?",
        ),
    ),
)

PYTHON = (
    Fact(
        'Model loads a model folder: model = genai.Model("folder").',
        things=("the Model class", "genai.Model", "Model in Python"),
        actions=("load a model in Python", "load a model folder in Python", "open a model from Python"),
    ),
    Fact(
        "Tokenizer turns text into token ids with encode, and back with decode.",
        things=("the Tokenizer class", "genai.Tokenizer", "Tokenizer in Python"),
        actions=("encode text in Python", "turn text into tokens", "turn tokens into text"),
    ),
    Fact(
        "Generator makes tokens one by one: append_tokens, then generate_next_token until is_done.",
        things=("the Generator class", "genai.Generator", "Generator in Python"),
        actions=("generate tokens in Python", "write a generation loop", "generate text from Python"),
    ),
    Fact(
        "GeneratorParams holds search options such as max_length and temperature.",
        things=("GeneratorParams", "the GeneratorParams class", "genai.GeneratorParams"),
        actions=("set search options in Python", "set max_length in Python"),
    ),
    Fact(
        "TokenizerStream decodes one token at a time, so that text can be streamed.",
        things=("TokenizerStream", "the TokenizerStream class", "genai.TokenizerStream"),
        actions=("stream text in Python", "decode one token at a time"),
    ),
    Fact(
        "Yes: write import genai as og, and programs for onnxruntime-genai run.",
        questions=(
            *("Is it compatible with onnxruntime-genai?", "Can I run onnxruntime-genai programs?"),
            *(
                "Does my onnxruntime-genai code work?",
                "Can I import genai as og?",
                "Is the API like onnxruntime-genai?",
            ),
            *("Can I use old onnxruntime-genai scripts?", "Do onnxruntime-genai examples run?"),
        ),
    ),
)
