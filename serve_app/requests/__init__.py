"""OpenAI's, Anthropic's and Ollama's request shapes, and their translation to the engine's own.

What a field may hold is said once, here. A field that would change the answer but is not supported is refused; other
unknown fields are ignored, and named in a header of the answer.
"""

from serve_app.requests.anthropic import CountTokensRequest, MessagesRequest
from serve_app.requests.chat import ChatRequest
from serve_app.requests.completion import CompletionRequest
from serve_app.requests.messages import ChatMessage
from serve_app.requests.ollama import LoadRequest, OllamaChatRequest, OllamaGenerateRequest
from serve_app.requests.parsing import AbortRequest, GrammarRequest, parse
from serve_app.requests.pooled import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from serve_app.requests.responses import ResponsesRequest
from serve_app.requests.sampling import MAX_CHOICES, SamplingFields

__all__ = [
    "MAX_CHOICES",
    "AbortRequest",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "CountTokensRequest",
    "EmbeddingRequest",
    "GrammarRequest",
    "LoadRequest",
    "MessagesRequest",
    "OllamaChatRequest",
    "OllamaGenerateRequest",
    "PoolingRequest",
    "RerankRequest",
    "ResponsesRequest",
    "SamplingFields",
    "ScoreRequest",
    "parse",
]
