"""In place of what people call now: `brim.push_to_hub(ds, …)` for `ds.push_to_hub(…)`, `brim.map` for `ds.map`."""
