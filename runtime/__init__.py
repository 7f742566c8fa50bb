"""What runs at training time: operators, gathered parameters, reductions, clipping. Imports torch only, no FX."""
