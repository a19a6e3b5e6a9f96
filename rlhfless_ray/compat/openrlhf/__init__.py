"""Translate OpenRLHF command lines of versions 0.8.0 to 0.11.2 into settings of a recipe.

command.py         find the launcher in a command, and the command to run instead
script_run.py      run a launch script whose launchers are recorded and not started
shim/              replace the launcher in unmodified scripts, or record it
flags.py           every flag of every version (data/*.json)
parsers.py         an argparse parser for each version
dialect.py         find the version that a command is written for
elastic_flags.py   this project's own flags, --elastic.* and --prefix.*
normalise.py       convert any version's flags to the newest names
checks.py          the launcher's own validations
rules.py           what a flag means; flag_table.py, supervised_table.py and inference_table.py have a rule for each flag
                   (flag_semantics.py, idle_flags.py, rank_groups.py, recipe_keys.py)
translate.py       combine all of these
departures.py      notes on what this runtime does differently
other_versions.py  notes on what another version does differently
explain_report.py  text for the user (resources.py, memory.py)
"""
