"""OpenRLHF command lines, every dialect from 0.8.0 to 0.11.2 → settings of a recipe.

command.py    where in a command the launcher is; what to run instead        shim/   the same for unmodified scripts
flags.py      the facts: every flag of every version (data/*.json)
parsers.py    a real argparse parser for each version
dialect.py    which version a command is written in; mixtures of versions
own.py        our own settings, --elastic.* and --prefix.*
canonical.py  any dialect → the names of the newest version
checks.py     the launcher's own validations
table.py      newest name → recipe keys (keys.py: what they mean)
translate.py  all of it together                                             page.py, resources.py   how it is told
"""
