"""Folders of tiny language models with tokenizers: each token is a word of four letters."""

from itertools import product

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.integrations.models import llama

WORDS = ["".join(letters) for letters in product("bdklmnrt", "aeio", "bdgv", "aeio")]
"""The vocabulary: 512 words."""

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] == 'user' and 'baba' or 'dada' }} "
    "{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}dada{% endif %}"
)

PROMPT = "lado mibe koga neda"


def tokenizer(template=TEMPLATE):
    made = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token=WORDS[0])
    fast.chat_template = template
    return fast


def save_model(folder, *, template=TEMPLATE, layers=4, **options):
    """Save a Llama and its tokenizer in a folder, and return the model; `options` are for `generate`."""
    model = llama(vocab_size=len(WORDS), num_hidden_layers=layers, max_position_embeddings=512)
    model.generation_config.update(**options)
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return model
