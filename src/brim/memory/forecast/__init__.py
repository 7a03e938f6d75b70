"""Will it fit: forecasts of how much memory a pattern of work takes, with the arithmetic shown.

`model` is what a forecast is; `shapes` computes one from numbers, `running` from a process, `sampled` from runs
on parts of the data. What brim's own builds take is forecast by `brim.plans.forecast`.
"""
