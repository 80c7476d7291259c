"""docs/trl.md from the table that the package itself translates with (`rlhf_nb/trl.yaml`)."""

from __future__ import annotations

from pathlib import Path

from rlhf_nb.aliases import trl_words

PLACE = Path(__file__).resolve().parent.parent / "docs" / "trl.md"
HEAD = """# Coming from TRL

Change the import, `from rlhf_nb import SFTConfig, SFTTrainer`, and run your script. Trainers take TRL's arguments, configs take its words, and one note at the start says what became of each word that is more than another name. Twenty-six first scripts of people who come from TRL are tests of this package (`tests/test_trl_scripts.py`); 25 run as they stand, and one ends in a sentence: `trainer.push_to_hub()` sends nothing, `rlhf-nb push RUN OWNER/NAME` does.

| TRL | here |
|---|---|
| `trainer.train()`, its `global_step`, `training_loss`, `metrics` | the same; `trainer.fit()` is our word |
| `trainer.state.global_step`, `.max_steps`, `.epoch`, `.log_history` | the same |
| `trainer.evaluate(eval_dataset)`, `.save_model(folder)`, `.log_metrics`, `.save_metrics`, `.save_state` | the same; numbers are called `eval/loss`, and `metrics["eval_loss"]` finds them |
| `trainer.predict(rows)`, `compute_metrics`, `preprocess_logits_for_metrics` | the same in reward (scores `[B, 2]`) and sft (logits, up to 1 GiB); the other methods report their own metrics |
| `args=TrainingArguments(...)` | read as the trainer's config: what you set, and its learning rate, epochs, batch and seed in any case |
| `PPOTrainer(model, ref_model, reward_model, value_model, ...)` | the four models as given; `value_model` is the critic that trains |
| `TrlParser`, `ScriptArguments`, `ModelConfig`, `get_peft_config`, `get_quantization_config` | the same |

**Batches.** A batch there is `per_device_train_batch_size` × `gradient_accumulation_steps` × devices. Here it is `mini_batch_size`, the rows of an optimizer step over all devices; rows per device and forward are `micro_batch_size`. GRPO and RLOO draw `rollout_batch_size` answers at a time (`generation_batch_size`, or `steps_per_generation` batches), PPO `num_mini_batches` batches, and online DPO counts prompts there and answers here. A step here is one collect: where several optimizer steps learn from it, numbers of steps are divided, and rounded up.

**Defaults** stay ours: a word that you don't write has the value of `rlhf-nb config init METHOD`.
"""


def page() -> str:
    """The whole page."""
    out, free, needless = [HEAD], trl_words("free"), trl_words("needless")
    out.append("## The same under another name\n\n| TRL | here |\n|---|---|")
    out += [f"| `{word}` | `{ours}` |" for word, ours in trl_words("same").items()]
    out.append(
        "\n## Translated, or needing nothing\n\nWhat is marked · changes no number here, so any value may stand.\n"
    )
    out.append("| TRL | what it is there | here |\n|---|---|---|")
    for word, text in trl_words("explained").items():
        there, _, here = text.partition(": here ")
        only = f" (as it is: {', '.join(repr(x) for x in needless[word])})" if word in needless else ""
        out.append(f"| `{word}`{' ·' if word in free else ''} | {there}{only} | {here} |".replace("**", ""))
    out.append("\n## Other classes and functions\n\n| TRL | here |\n|---|---|")
    out += [f"| `{word}` | {here} |" for word, here in trl_words("names").items()]
    out.append("\n## Arguments that a trainer refuses\n\n| TRL | instead |\n|---|---|")
    out += [f"| `{word}` | {here} |" for word, here in trl_words("refused").items()]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    PLACE.write_text(page(), encoding="utf-8")
