"""mteb: its wrapper for servers with OpenAI's API, and tasks of the held-out pairs in place of the hub's."""

import mteb
import numpy
from checks import URL, report
from datasets import Dataset
from embedding_checks import MODEL, TEXTS, same_rows
from evaluation_checks import JUDGED, PASSAGES, QUERIES, rows_of_library, same_scores
from mteb.abstasks import AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
from mteb.models import OpenAIAPIEncodeWrapper
from mteb.models.abs_encoder import AbsEncoder
from torch.utils.data import DataLoader

# By default, it sends vLLM's `messages`, which are only for models with a chat template.
served = OpenAIAPIEncodeWrapper(URL, MODEL, modalities=["text"], use_chat_template=False, max_retries=1)
LONG_TEXT = "keys and values " * 300  # more tokens than fit; the wrapper asks for as many as do


def about(kind, main_score):
    return mteb.TaskMetadata(
        name=f"HeldOut{kind}",
        description="Titles of Quire's documentation, and the texts under them",
        type=kind,
        main_score=main_score,
        eval_langs=["eng-Latn"],
        dataset={"path": "na", "revision": "na"},
    )


class HeldOutRetrieval(AbsTaskRetrieval):
    """Which text is under a title."""

    metadata = about("Retrieval", "ndcg_at_10")

    def load_data(self, **options):
        names = [str(number) for number in range(len(QUERIES))]
        split = RetrievalSplitData(
            corpus=Dataset.from_dict({"id": names, "text": PASSAGES}),
            queries=Dataset.from_dict({"id": names, "text": QUERIES}),
            relevant_docs={name: {name: 1} for name in names},
            top_ranked=None,
        )
        self.dataset, self.data_loaded = {"default": {"test": split}}, True


class HeldOutSTS(AbsTaskSTS):
    """Whether a text is under a title."""

    metadata = about("STS", "spearman")
    min_score, max_score = 0, 1

    def load_data(self, **options):
        titles, passages, judged = map(list, zip(*JUDGED, strict=True))
        split = Dataset.from_dict({"sentence1": titles, "sentence2": passages, "score": judged})
        self.dataset, self.data_loaded = {"test": split}, True


class Library(AbsEncoder):
    """The rows of `LLM.embed`."""

    def __init__(self):
        self.rows = rows_of_library()

    def encode(self, inputs, **options):
        return numpy.array([self.rows[text] for batch in inputs for text in batch["text"]])


def scores(model):
    results = mteb.evaluate(model, [HeldOutRetrieval(), HeldOutSTS()], cache=None)
    return [result.get_score() for result in results.task_results]


def embeddings():
    texts = [*TEXTS, LONG_TEXT]
    loader = DataLoader([{"text": text} for text in texts], batch_size=2)
    task = {"task_metadata": HeldOutSTS.metadata, "hf_split": "test", "hf_subset": "default"}
    found = served.encode(loader, **task, batch_size=2).tolist()
    same_rows(found, texts, truncate_prompt_tokens=-1)


def evaluation():
    random = mteb.get_model("mteb/baseline-random-encoder")
    same_scores(scores(served), scores(Library()), scores(random))


report(embeddings=embeddings, evaluation=evaluation)
