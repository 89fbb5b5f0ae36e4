"""The measuring program: it traces models and times this machine. The only code that imports torch.

It is a program, not a library: `dpsim` starts it, and nothing of `dpsim` imports it.
"""
