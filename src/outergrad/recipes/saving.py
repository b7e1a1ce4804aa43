"""The checkpoints of a training of a recipe: of which job, how often, and going on from them."""

import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import outergrad as og
from outergrad.checkpoint.folder import saves_in, write_with
from outergrad.recipes.errors import RecipeError
from outergrad.recipes.job import Job, option
from outergrad.recipes.position import Position
from outergrad.recipes.sites import number_in, rank_in
from outergrad.recipes.training import Training

MAY_CHANGE = ("sites", "epochs")
"""What a job that goes on may have otherwise than when it was saved."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Where a training is saved, and when.

    Attributes:
        folder: Of the checkpoints.
        every: Save after so many steps; and after the last.
        pause_after: End after so many checkpoints, for sites that were lost to come back.
        allow_lost: Whether to go on without the files of a site that is lost.
    """

    folder: Path
    every: int = 100
    pause_after: int | None = None
    allow_lost: bool = False

    @property
    def begun(self) -> bool:
        """Whether this site sees something to go on from."""
        return bool(saves_in(self.folder))

    def claim(self, job: Job) -> None:
        """Makes the folder that of a job.

        Raises:
            RecipeError: It is that of another one, or cannot be written to.
        """
        path = self.folder / "job.json"
        try:
            if self.begun and path.exists():
                self._compare(job, json.loads(path.read_text()))
            else:
                text = json.dumps(asdict(job))
                write_with(path, lambda file: file.write(text.encode()))
        except (OSError, ValueError) as error:
            if isinstance(error, RecipeError):
                raise
            reason = error.strerror if isinstance(error, OSError) else error
            raise RecipeError(f"--checkpoint {self.folder}: {reason}") from error

    def _compare(self, job: Job, then: dict[str, object]) -> None:
        now = json.loads(json.dumps(asdict(job)))
        for name in (field.name for field in fields(job) if field.name not in MAY_CHANGE):
            if name in then and then[name] != now[name]:
                raise RecipeError(
                    f"--checkpoint {self.folder} holds another job: {option(name)} was "
                    f"{then[name]!r} and is {now[name]!r}; name another folder, or start that job"
                )


class Saver:
    """Saves a training after every so many steps, and goes on from there.

    Args:
        saving: Where and when; None for never.
        training: What to save.
        position: How far it is.
        job: Of which it is a part.
        present: The numbers of the sites, where some are left out.
    """

    def __init__(
        self,
        saving: Saving | None,
        training: Training,
        position: Position,
        job: Job,
        present: tuple[int, ...] | None,
    ) -> None:
        self._saving, self._position = saving, position
        self._last = training.batches.steps, job.epochs - 1
        self._made = 0
        self._recording = training.recording
        self._first = rank_in(training.group) == 0
        if saving is not None:
            self._checkpoints = og.Checkpoints(
                saving.folder,
                training.replica.session,
                model=training.replica.model,
                optimizer=training.optimizer,
                site=number_in(training.group, present),
                group=training.group,
                position=position,
            )

    def restore(self) -> bool:
        """Goes on from what there is; whether there was something.

        Raises:
            RecipeError: The job is to end before that.
        """
        if self._saving is None:
            return False
        found = self._checkpoints.restore(allow_lost=self._saving.allow_lost)
        if found is None:
            return False
        self._position.resumed()
        self._recording.resume(self._position.done)
        if self._position.epoch > self._last[1]:
            raise RecipeError(
                f"--checkpoint {self._saving.folder} has done {self._position.epoch} epochs: "
                f"raise --epochs above that, or name another folder"
            )
        if self._first and found.exact:
            print(f"outergrad: {found}", file=sys.stderr, flush=True)
        return True

    def step(self) -> bool:
        """A step is done: saves, if it is time to; whether the training is to pause."""
        saving, position = self._saving, self._position
        if saving is None:
            return False
        last = (position.batch, position.epoch) == self._last
        if position.done % saving.every and not last:
            return False
        self._checkpoints.save(position.done)
        position.start()
        self._made += 1
        return not last and self._made == saving.pause_after
