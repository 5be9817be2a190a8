"""Conversations: several turns with a model, fed so that its state goes on from turn to turn."""

from mlxspec.conversation.conversation import CONTEXT_POLICIES, Conversation, Turn
from mlxspec.conversation.files import resume_conversation, save_conversation

__all__ = [
    "CONTEXT_POLICIES",
    "Conversation",
    "Turn",
    "resume_conversation",
    "save_conversation",
]
