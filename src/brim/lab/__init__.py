"""brim lab: common patterns and how they use memory, as experiments that can be repeated.

An experiment's parts run in processes of their own (`child`), measured from outside (`measure`); `steps` is what
was seen and how it is shown. Each of `leak`, `embed_list`, `push` and `map` is one experiment.
"""
