"""`genai generate`: replies to prompts or continues texts, without a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.progress import quietly, task
from genai.common.reading import read_text_file
from genai.errors import InputError, OptionError, located

from . import options as opt
from .options import sampling_flags
from .repetition import RepetitionWatch
from .reply_notes import empty_reason
from .template_args import TemplateArgs, check_template_args, read_template_args
from .terminal import (
    TextWriter,
    Voice,
    dump_prompt,
    emit,
    emit_text,
    footer,
    generating,
    need_chat_template,
    read_stdin,
    say,
    termination_raises,
    with_stdin,
)

# A file with this many lines, or with one of these extensions, may be a list of prompts.
_LIKE_A_LIST, _LISTS = 20, (".jsonl", ".ndjson", ".csv", ".tsv")

if TYPE_CHECKING:
    from genai.llm.completion import Completion
    from genai.llm.llm import LLM
    from genai.llm.mapping import Answer


@sampling_flags
@opt.flag_groups
def generate(
    model: opt.ModelArgument = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "-p", "--prompt", help="Text to continue, or - for stdin; may be given several times [default: -]."
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("-f", "--file", help="Use the whole file as one prompt; may be given several times."),
    ] = None,
    system: Annotated[
        str | None, typer.Option("-s", "--system", help="System message that precedes each prompt.")
    ] = None,
    as_chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send each prompt (with --chat, preceded by piped input) as a user message, or continue its text "
            "[default: a user message if the model has a chat template].",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", help="Completions per prompt; with --beams, beams to return.", min=1)
    ] = 1,
    beams: Annotated[
        int | None, typer.Option("--beams", help="Use beam search with this number of beams.", min=2)
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option("--length-penalty", help="With --beams: values above 0 favour longer texts [default: 1]."),
    ] = None,
    early_stopping: Annotated[
        str | None, typer.Option("--early-stopping", help="With --beams: true, false or never [default: false].")
    ] = None,
    template_args: TemplateArgs = None,
    special: opt.SpecialTokens = None,
    literal: opt.Literal = None,
    greedy: opt.Greedy = False,
    timeout: Annotated[float | None, typer.Option("--timeout", help="Stop after this many seconds.")] = None,
    logprobs: Annotated[
        int | None,
        opt.output_option(help="With --json: log-probabilities of the tokens and of this many alternatives."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        opt.output_option(help="With --json: log-probabilities of the prompt's tokens and of this many alternatives."),
    ] = None,
    as_json: Annotated[
        bool, opt.output_option("--json", help="Print one JSON object per completion or failed prompt.")
    ] = False,
    *,
    flags: opt.TextFlags,
    sampling: dict[str, Any],
) -> None:
    """Reply to prompts, or continue texts, and print the results.

    Prompts are user messages if the model has a chat template, unless --raw is set. A single reply is streamed. Several
    prompts run as one batch.
    """
    model, flags = flags.with_adapter(model)
    sampling |= opt.greedy_options(sampling) if greedy else {}
    options = {**sampling, **_extra(samples, logprobs, prompt_logprobs, as_json)}
    options |= {"timeout": timeout} if timeout is not None else {}
    options |= {"add_special_tokens": special} if special is not None else {}
    options |= {"ctx_shift": flags.shift} if flags.shift else {}
    if beams is not None:
        if 1 <= beams < samples:
            raise OptionError(
                f"--samples {samples} cannot be used with --beams {beams}",
                "a beam search returns at most one text per beam",
                f"use --beams {samples}, or a smaller --samples",
            )
        options |= {"num_beams": beams, "num_return_sequences": options.pop("n", 1)}
    options |= _beam_options(beams, length_penalty, early_stopping)
    variables = read_template_args(template_args)
    _check_raw(as_chat, system, variables)
    texts = _texts(prompts, files, as_chat is True, flags.voice)
    with flags.load_llm(model) as llm:
        is_chat = _is_chat(llm, as_chat, system, variables)
        rendered = _rendered(llm, texts, system, variables, literal) if is_chat else texts
        literal = None if is_chat else literal  # rendering has applied it to the conversation
        options |= {"literal": literal} if literal is not None else {}
        if not is_chat:
            _check_texts(llm, rendered, special)
        if flags.show_prompt:
            for text in rendered:
                dump_prompt(llm, text, add_special_tokens=special, literal=literal)
        failed = False
        if len(rendered) == samples == 1 and not as_json and beams is None:
            completions = [_stream(llm, rendered[0], flags, options, sampling)]
        elif beams is not None:
            completions = _searched(llm, rendered, flags, options, as_json=as_json)
        else:
            completions, failed = _batch(llm, rendered, flags, options, as_json=as_json)
        for completion in completions:
            if (reason := empty_reason(llm, completion, completion.text)) is not None:
                flags.voice.say(f"({_named(completion, completions)}{reason})")
            if completion.finish_reason == "timeout" and timeout is not None:
                flags.voice.say(f"({_named(completion, completions)}the time limit of {timeout:g} s ended the reply)")
            if completion.finish_reason == "length" and _fills_context(llm, completion):
                flags.voice.say(f"(the context of {llm.context_size:,} tokens is full, so the reply was cut off)")
            if completion.forgotten_tokens and not flags.stats:
                flags.voice.say(f"(the context was full, so {completion.forgotten_tokens:,} tokens were dropped)")
        for completion in completions if flags.stats else ():
            say(footer(completion, llm.context_size, options.get("seed")))
    if failed:
        raise typer.Exit(1)


def _fills_context(llm: LLM, completion: Completion) -> bool:
    return completion.prompt_tokens + len(completion.token_ids) - completion.forgotten_tokens >= llm.context_size


def _extra(samples: int, logprobs: int | None, prompt_logprobs: int | None, as_json: bool) -> dict[str, Any]:
    numbers = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    options: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    if options and not as_json:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in options)
        raise OptionError(f"{names} cannot be used without --json", "plain text has no log-probabilities", "add --json")
    return options | ({"n": samples} if samples > 1 else {})


def _beam_options(beams: int | None, length_penalty: float | None, early_stopping: str | None) -> dict[str, Any]:
    """Return the options of a beam search."""
    flags = {"--length-penalty": length_penalty, "--early-stopping": early_stopping}
    for name, value in flags.items():
        if beams is None and value is not None:
            raise OptionError(
                f"{name} cannot be used without --beams",
                "this option applies only to beam search",
                "add --beams, such as --beams 4",
            )
    options: dict[str, Any] = {} if length_penalty is None else {"length_penalty": length_penalty}
    if early_stopping is not None:
        known = {"true": True, "false": False, "never": "never"}
        if early_stopping not in known:
            raise OptionError(
                f"--early-stopping is {early_stopping}", "allowed: true, false, never", "use one of these values"
            )
        options["early_stopping"] = known[early_stopping]
    return options


def _check_raw(as_chat: bool | None, system: str | None, variables: Mapping[str, Any]) -> None:
    """Raise OptionError if raw prompts are combined with options of conversations."""
    for name, given in (("--system", system is not None), ("--template-arg", bool(variables))):
        if given and as_chat is False:
            raise OptionError(
                f"{name} cannot be used with --raw", "no chat template formats raw prompts", "remove one of the two"
            )


def _is_chat(llm: LLM, as_chat: bool | None, system: str | None, variables: Mapping[str, Any]) -> bool:
    """Return True if prompts are user messages, after checking that the model can format them."""
    if as_chat or system is not None or variables:
        need_chat_template(llm)
        check_template_args(llm, variables)
        return True
    return as_chat is None and bool(llm.tokenizer.chat_template)


def _rendered(
    llm: LLM, texts: Sequence[str], system: str | None, variables: Mapping[str, Any], literal: bool | None
) -> list[str]:
    """Return the prompts of conversations with one user message each."""
    before = [] if system is None else [{"role": "system", "content": system}]
    for index, text in enumerate(texts):
        if not text.strip():
            where = f"prompt {index} is empty" if len(texts) > 1 else "the prompt is empty"
            raise InputError(where, "a user message has text", 'pass a text, such as -p "What is 12 + 7?"')
    conversations = [[*before, {"role": "user", "content": text}] for text in texts]
    return [llm.render(messages, template=variables, literal=literal) for messages in conversations]


def _check_texts(llm: LLM, texts: Sequence[str], special: bool | None) -> None:
    """Raise InputError if a raw prompt is empty, unless the tokenizer adds a token that begins each text."""
    for index, text in enumerate(texts):
        if not text and not llm.encode(text, add_special_tokens=special):
            where = f"prompt {index} is empty" if len(texts) > 1 else "the prompt is empty"
            raise InputError(where, "there is no text to continue", 'pass text with -p, such as -p "Once upon a time"')


def _named(completion: Completion, completions: Sequence[Completion]) -> str:
    """Return the beginning of a note about one of several completions; "" if there is only one."""
    return f"prompt {completion.prompt_index}: " if len(completions) > 1 else ""


def _texts(prompts: Sequence[str] | None, files: Sequence[Path] | None, with_input: bool, voice: Voice) -> list[str]:
    """Return the prompts in order: `prompts`, then the files; stdin if both are empty.

    With `with_input`, piped input precedes each prompt, as in `genai chat`.
    """
    sources = list(prompts or ()) or ([] if files else ["-"])
    if sources.count("-") > 1:
        raise InputError("-p - is given more than once", "stdin can be read only once", "keep only one -p -")
    texts = [read_stdin() if prompt == "-" else prompt for prompt in sources]
    texts += [_text_of(file, voice) for file in files or ()]
    return with_stdin(texts) if with_input and "-" not in sources else texts


def _text_of(file: Path, voice: Voice) -> str:
    """Read a file as one prompt. If the file looks like a list of prompts, suggest `genai batch`."""
    text = read_text_file(file)
    lines = sum(bool(line.strip()) for line in text.splitlines())
    if lines >= _LIKE_A_LIST or (lines > 1 and file.suffix.lower() in _LISTS):
        voice.say(
            f"{file}: all {lines:,} lines form one prompt; to process each line separately, "
            f"use `genai batch {file} -o OUTPUT`"
        )
    return text


def _stream(llm: LLM, text: str, flags: opt.TextFlags, options: dict[str, Any], sampling: dict[str, Any]) -> Completion:
    with generating(quiet=flags.quiet) as line, llm.stream(text, adapter=flags.adapter, **options) as stream:
        stream.on_prompt = line.show
        ends_itself = llm.params(**sampling).max_tokens is None and not sampling.get("ignore_eos")
        watch = RepetitionWatch(flags.voice, stream.cancel if ends_itself else None, "use --repeat-penalty 1.1")
        writer = TextWriter()
        try:
            for piece in stream:
                line.close()
                writer.write(piece)
                watch.feed(piece)
        finally:
            writer.end()
        return stream.completion


def _searched(
    llm: LLM, prompts: Sequence[str], flags: opt.TextFlags, options: dict[str, Any], *, as_json: bool
) -> list[Completion]:
    """Print the results of a beam search."""
    with quietly(flags.quiet), task("Generating") as line:
        completions = llm.generate(prompts, progress=line.show, adapter=flags.adapter, **options)
    for completion in completions:
        _show(llm, completion, as_json=as_json)
    return completions


def _batch(
    llm: LLM, prompts: Sequence[str], flags: opt.TextFlags, options: dict[str, Any], *, as_json: bool
) -> tuple[list[Completion], bool]:
    """Print the completions of each prompt when they and those of earlier prompts are finished.

    After Ctrl-C and SIGTERM, also print the completions that were waiting for an earlier prompt.

    Returns:
        The completions, and True if a prompt failed.
    """
    from genai.llm.batch.openai_format import error_object

    finished: dict[int, Answer[str]] = {}
    printed: list[Completion] = []
    failed = False

    def show(answer: Answer[str]) -> None:
        nonlocal failed
        del finished[answer.index]
        if answer.error is not None:
            failed = True
            if len(prompts) == 1:
                raise answer.error
            if as_json:
                emit(json.dumps({"prompt_index": answer.index, "error": error_object(answer.error)}), "\n")
            say(f"error: {located(answer.error, f'prompt {answer.index}')}")
        for number, completion in enumerate(answer.completions, 1):
            if len(answer.completions) > 1 and not as_json:
                flags.voice.say(f"(sample {number} of {len(answer.completions)})")
            printed.append(replace(completion, prompt_index=answer.index))
            _show(llm, printed[-1], as_json=as_json)

    with quietly(flags.quiet), task("Generating") as line, termination_raises():
        try:
            for answer in llm.map(
                prompts,
                on_answer=lambda answer: finished.update({answer.index: answer}),
                progress=lambda figures: line.show(figures.done, len(prompts)),
                adapter=flags.adapter,
                **options,
            ):
                show(answer)
        finally:
            for index in sorted(finished):
                show(finished[index])
    return printed, failed


def _show(llm: LLM, completion: Completion, *, as_json: bool) -> None:
    """Print a completion to stdout."""
    if as_json:
        emit(json.dumps(_as_json(llm, completion)), "\n")
    else:
        emit_text(completion.text)


def _as_json(llm: LLM, completion: Completion) -> dict[str, Any]:
    result = asdict(completion)
    del result["state"]  # part of the KV cache
    for name in ("logprobs", "prompt_logprobs"):
        entries = getattr(completion, name)
        result[name] = entries and [entry and _logprob(llm, entry) for entry in entries]
    return result


def _logprob(llm: LLM, entry: Any) -> dict[str, Any]:
    def text_of(token: int) -> str:
        return llm.tokenizer.decode_each([token])[0]

    top = [{"token": token, "text": text_of(token), "logprob": value} for token, value in entry.top]
    return {"token": entry.token, "text": text_of(entry.token), "logprob": entry.logprob, "top": top}
