"""Run the demo with two short prompts; the arguments are those of the demo."""

import sys

from ragged_attention.demo import command
from ragged_attention.demo.prompts import Prompt

command.PROMPTS = (Prompt(0, "A language model writes one token"), Prompt(1, "A language model writes"))
sys.exit(command.main(sys.argv[1:]))
