"""Constrain answers to a regular expression, a choice, and a JSON schema.

python examples/structured_output.py
"""

import json

from quire import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    # Without bounds an integer may have any number of digits, and a model may never stop writing them.
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 198}, "even": {"type": "boolean"}},
    "required": ["sum", "even"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask the same question three times, each time with another constraint."""
    constraints = [
        StructuredOutputsParams(regex="[0-9]{1,3}"),
        StructuredOutputsParams(choice=("yes", "no")),
        StructuredOutputsParams(json=SCHEMA),
    ]
    # max_tokens must leave room for the whole structure: an answer that is cut off is not valid.
    params = [
        SamplingParams(temperature=0, max_tokens=64, structured_outputs=constraint)
        for constraint in constraints
    ]
    question = [{"role": "user", "content": "What is 27 + 58?"}]
    with LLM("mini") as llm:
        number, choice, document = (
            output.outputs[0].text for output in llm.chat([question] * len(params), params)
        )
    # The constraint guarantees the form. Whether the content is right depends on the model.
    print("number:", int(number))
    print("choice:", choice)
    print("document:", json.dumps(json.loads(document)))


if __name__ == "__main__":
    main()
