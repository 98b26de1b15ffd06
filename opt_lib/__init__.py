"""The built-in optimization methods, one file each, named as in a strategy.

They are found through the entry-point group ``atorch_ns.methods``, as anybody's plug-in is. Modules that
begin with an underscore hold what several methods share.
"""
