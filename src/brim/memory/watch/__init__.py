"""Watch a process tree from outside: sample it, judge it, act on it, and write down what was seen."""
