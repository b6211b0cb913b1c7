// Talking to the server: the OpenAI form, its errors, and the stream of an answer.

const KEY = "sdmlm-api-key";
const TRIES = 6; // for a server that is busy (429)

/** What went wrong, in a sentence that can be shown. */
export class ApiError extends Error {
  constructor(message, status = 0, retryAfter = 1) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    // Not in the form we know, a proxy's page perhaps: the status must do.
  }
  if (response.status === 401) document.dispatchEvent(new CustomEvent("key-needed"));
  return new ApiError(message, response.status, Number(response.headers.get("Retry-After")) || 1);
}

async function send(path, method = "GET", body = undefined, signal = undefined) {
  let response;
  try {
    const sent = body === undefined ? undefined : JSON.stringify(body);
    response = await fetch(path, { method, body: sent, headers: headers(), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export const getInfo = async () => (await send("v1/sdm")).json();
export const sendFeedback = async (body) => (await send("v1/feedback", "POST", body)).json();
export const undoFeedback = (id) => send(`v1/feedback/${encodeURIComponent(id)}`, "DELETE");

/** The data of each server-sent event, parsed, until `[DONE]`. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const lines = buffer.split("\n");
    buffer = lines.pop(); // perhaps half a line
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** Ask, and call `onText` with each piece as it comes; gives the evidence (`choices[0].sdm`). */
export async function ask(messages, onText, signal) {
  const response = await send("v1/chat/completions", "POST", { messages, stream: true }, signal);
  let evidence = null;
  try {
    for await (const event of events(response)) {
      if (event.error) throw new ApiError(event.error.message);
      const choice = event.choices?.[0];
      if (choice?.delta?.content) onText(choice.delta.content);
      evidence = choice?.sdm ?? evidence;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection broke before the answer was complete: ask again.");
  }
  if (!evidence) throw new ApiError("The answer ended without a verdict: ask again.");
  return evidence;
}

/** Ask without a stream; waits and tries again while the server is busy. */
export async function askWhole(messages, signal) {
  for (let attempt = 1; ; attempt++) {
    try {
      const response = await send("v1/chat/completions", "POST", { messages }, signal);
      return (await response.json()).choices[0].sdm;
    } catch (error) {
      if (error.status !== 429 || attempt === TRIES) throw error;
      await pause(error.retryAfter * 1000, signal);
    }
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, milliseconds);
    signal.addEventListener("abort", stop, { once: true });
  });
}
