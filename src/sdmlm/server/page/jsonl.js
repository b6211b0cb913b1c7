// Prompts from the lines of a JSONL file, and what is wrong with the other lines.

/** {good: [{line, input, messages}], bad: [{line, message}]}; empty lines are neither. */
export function parsePrompts(text) {
  const [good, bad] = [[], []];
  text.replace(/^\ufeff/, "").split(/\r\n|\n|\r/).forEach((content, i) => {
    if (!content.trim()) return;
    try {
      good.push({ line: i + 1, ...parseLine(content) });
    } catch (error) {
      bad.push({ line: i + 1, message: error.message });
    }
  });
  return { good, bad };
}

function parseLine(content) {
  let value;
  try {
    value = JSON.parse(content);
  } catch {
    throw new Error("not JSON.");
  }
  if (typeof value === "string") value = { prompt: value };
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    throw new Error("neither an object nor a string.");
  }
  const { messages, prompt } = value;
  return { input: value, messages: messages === undefined ? fromPrompt(prompt) : checked(messages, "messages") };
}

function fromPrompt(prompt) {
  if (Array.isArray(prompt)) return checked(prompt, "prompt"); // the conversational form of our data files
  if (typeof prompt !== "string" || !prompt.trim()) throw new Error('no "prompt" with text, and no "messages".');
  return [{ role: "user", content: prompt }];
}

function checked(messages, name) {
  const isTurn = (m) => typeof m?.role === "string" && typeof m?.content === "string";
  if (!Array.isArray(messages) || !messages.length || !messages.every(isTurn)) {
    throw new Error(`"${name}" must be a list of objects with "role" and "content".`);
  }
  return messages;
}
