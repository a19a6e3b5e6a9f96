"""Choose how many tokens to draft, by learned acceptance rates and step times.

A drafted token is verified in the next decode step. It is kept if it is the token that the step draws at its position, and if all
drafted tokens before it were kept. A draft therefore changes the time of a step and never what is sampled.
"""
