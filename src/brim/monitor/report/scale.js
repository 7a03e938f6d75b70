// Numbers as people read them, and where to put the ticks of an axis. The same units as brim's texts.

const UNITS = ["B", "KB", "MB", "GB", "TB", "PB"];

function sizeText(bytes) {
  let value = bytes, unit = 0;
  while (Math.abs(value) >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

// Every tick of one axis in the same unit, with as many digits as the step needs.
function sizeTicks(top, most) {
  const rough = top / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough) || 10 * power;
  const unit = Math.max(0, Math.min(UNITS.length - 1, Math.floor(Math.log10(Math.max(top, 1)) / 3)));
  const scale = 1000 ** unit;
  const digits = Math.max(0, Math.min(3, -Math.floor(Math.log10(step / scale) + 1e-9) + (step / power === 2.5 ? 1 : 0)));
  const ticks = [];
  for (let n = 0; n * step <= top * 1.0001; n += 1) {
    const value = n * step;
    ticks.push({ value, text: n === 0 ? "0" : `${(value / scale).toFixed(digits)} ${UNITS[unit]}` });
  }
  return ticks;
}

const MINUTE = 60, HOUR = 3600, DAY = 86400;
const TIME_STEPS = [
  0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30,
  MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE,
  HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 5 * DAY, 10 * DAY, 30 * DAY, 90 * DAY, 365 * DAY,
];

function timeTicks(span, most) {
  const step = TIME_STEPS.find((s) => span / s <= most) || Math.ceil(span / most / DAY) * DAY;
  const ticks = [];
  for (let n = 0; n * step <= span * 1.0001 && n < 100; n += 1) ticks.push({ value: n * step, text: elapsed(n * step, step) });
  return ticks;
}

// A time since the beginning, as exact as `step` asks for.
function elapsed(seconds, step) {
  if (seconds === 0) return "0";
  if (step < 1) return `${seconds.toFixed(step < 0.1 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  if (whole < MINUTE) return `${whole} s`;
  const days = Math.floor(whole / DAY), hours = Math.floor((whole % DAY) / HOUR);
  const minutes = Math.floor((whole % HOUR) / MINUTE), rest = whole % MINUTE;
  const two = (number) => String(number).padStart(2, "0");
  if (whole < HOUR) return rest || step < MINUTE ? `${minutes}:${two(rest)} min` : `${minutes} min`;
  if (days === 0) return step < MINUTE ? `${hours}:${two(minutes)}:${two(rest)} h` : minutes ? `${hours}:${two(minutes)} h` : `${hours} h`;
  if (step >= DAY) return `${days} d`;
  return `${days} d ${hours}:${two(minutes)}`;
}

// The time of day where the page was made, wherever it is read.
function clockText(t, zoneSeconds) {
  const date = new Date((t + zoneSeconds) * 1000);
  return Number.isNaN(date.getTime()) ? "" : date.toISOString().slice(0, 19).replace("T", " ");
}
