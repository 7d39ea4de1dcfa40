// What checks.py has, for Node.
export const url = process.env.QUIRE_URL;
export const baseURL = `${url}/v1`;
export const modelName = "mini";
export const question = "Please explain what a KV block is.";
export const answer = "A fixed-size piece of the KV cache that holds the keys and values of a few tokens.";
export const secondQuestion = "What is 47+38?";
export const secondAnswer = "85";
export const weatherQuestion = "Do I need an umbrella in Oslo?";
export const cities = ["Oslo", "Rome"];
export const maxTokens = 200;

export function same(found, expected) {
  if (found !== expected) throw new Error(`${JSON.stringify(found)} instead of ${JSON.stringify(expected)}`);
}

export function streamed(pieces) {
  same(pieces.join(""), answer);
  if (pieces.filter(Boolean).length < 2) throw new Error("the answer came in one piece");
}

export function weather(found) {
  same(Object.keys(found).sort().join(), "city,days");
  if (!cities.includes(found.city) || ![1, 2, 3].includes(found.days)) {
    throw new Error(`invalid arguments: ${JSON.stringify(found)}`);
  }
}

export async function report(checks) {
  const outcome = {};
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      outcome[name] = "yes";
    } catch (error) {
      console.error(error);
      outcome[name] = `${error.name}: ${error.message.split("\n")[0].slice(0, 200)}`;
    }
  }
  console.log(JSON.stringify(outcome));
}
