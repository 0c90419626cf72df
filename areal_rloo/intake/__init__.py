"""Track which worker must generate each sample, from prompts to complete groups. Imports without torch.

`service` runs the intake on an event loop, for the training thread. `intake` is the state machine: a message in,
changes and replies out. `prompts` is the stream of prompts, `leasing` admits groups and grants leases, `fleet` knows
the rollout workers, `ledger` records the outcome of every sample, `buffer` chooses batches. `evaluation` leases
held-out prompts beside training. `reward_failures` ends a run whose rewards keep failing.
"""

from areal_rloo.intake.evaluation import EvalSet, Evaluation
from areal_rloo.intake.intake import Intake, IntakeStatistics
from areal_rloo.intake.ledger import Drop, Ledger
from areal_rloo.intake.prompts import Prompt, PromptStream, Tokenizer
from areal_rloo.intake.service import IntakeService

__all__ = [
    "Drop",
    "EvalSet",
    "Evaluation",
    "Intake",
    "IntakeService",
    "IntakeStatistics",
    "Ledger",
    "Prompt",
    "PromptStream",
    "Tokenizer",
]
