// Parser of Prometheus' text format, with sums and quantiles.

const SAMPLE = /^([\w:]+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = SAMPLE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) labels[name] = value;
    const name = found[1].replace(/^pelton:/, "");
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, value: Number(found[3]) });
  }
  return samples;
}

export function total(samples, name, where = {}) {
  let sum = 0;
  for (const { labels, value } of samples.get(name) ?? []) {
    if (Object.entries(where).every(([label, wanted]) => labels[label] === wanted)) sum += value;
  }
  return sum;
}

// Return the buckets of a histogram summed over its labels, minus those of `before`.
export function buckets(samples, before, name) {
  const counts = new Map();
  const add = (from, sign) => {
    for (const { labels, value } of from?.get(`${name}_bucket`) ?? []) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + sign * value);
    }
  };
  add(samples, 1);
  add(before, -1);
  return [...counts].sort(([one], [other]) => one - other);
}

// Return a quantile by linear interpolation within a bucket; null without observations.
export function quantile(histogram, share) {
  const number = histogram.at(-1)?.[1] ?? 0;
  if (number <= 0) return null;
  let lower = 0;
  let below = 0;
  for (const [bound, count] of histogram) {
    if (count >= share * number) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (share * number - below)) / (count - below || 1);
    }
    lower = bound;
    below = count;
  }
  return lower;
}

// Format a duration with three digits in seconds or milliseconds.
export function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.9995) return `${(1000 * seconds).toPrecision(3)} ms`;
  return seconds < 99.95 ? `${seconds.toPrecision(3)} s` : `${seconds.toFixed(0)} s`;
}
