// The body of a request, from a branch of a conversation and its settings.

/** The sampling options of the settings dialog: field, label, hint, and the attributes of its input. */
export const OPTIONS = [
  ["temperature", "Temperature", "0 selects the most likely token.", { type: "number", min: 0, max: 10, step: "any" }],
  ["top_p", "Top p", "Share of probability to select from.", { type: "number", min: 0, max: 1, step: "any" }],
  ["top_k", "Top k", "Number of tokens to select from.", { type: "number", min: 1, step: 1 }],
  ["min_p", "Min p", "Share of the highest probability that a token needs.", { type: "number", min: 0, max: 1, step: "any" }],
  ["repetition_penalty", "Repetition penalty", "Above 1 avoids repetitions.", { type: "number", min: 0.01, step: "any" }],
  ["max_tokens", "Maximum length", "Tokens per reply.", { type: "number", min: 1, step: 1 }],
  ["seed", "Seed", "The same seed repeats a reply.", { type: "number", min: 0, step: 1 }],
];

/** Return the text of a message with its attachments. */
export function fullText({ content, attachments = [] }) {
  const files = attachments.map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...files, content].filter(Boolean).join("\n\n");
}

/** Return the body of a request for the next message of a branch. */
export function requestBody(head, messages) {
  const system = head.system.trim() ? [{ role: "system", content: head.system }] : [];
  const turns = messages
    .filter((one) => one.role === "user" || one.content)
    .map((one) => ({ role: one.role, content: one.role === "user" ? fullText(one) : one.content }));
  const body = { messages: [...system, ...turns], stream: true, stream_options: { include_usage: true } };
  if (head.model) body.model = head.model;
  if (head.reasoning) body.reasoning_effort = head.reasoning;
  for (const [name] of OPTIONS) if (head.options[name] !== undefined) body[name] = head.options[name];
  return body;
}
