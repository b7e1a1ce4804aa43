"""DP-SGD among sites, as a transform of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from outergrad.core.transform import SiteGradient
from outergrad.linalg.outer import widened
from outergrad.linalg.roundings import roundings
from outergrad.linalg.sample_sums import weighted_sum
from outergrad.linalg.site_gradient import in_units, sample_norms, scaled_samples
from outergrad.private.clipping import clipped, normalized
from outergrad.private.correlated import Banded
from outergrad.private.counting import StepCounter
from outergrad.private.ledger import Ledger, Release
from outergrad.private.noise import Noise, add, add_to_all, source
from outergrad.private.quantile import Threshold
from outergrad.private.samplers import expected_size, sampling_of
from outergrad.private.sampling import Fixed, Sampling

Clipping = Literal["flat", "per_layer", "automatic", "adaptive"]

_COUNTED = 20
"""Of the expected batch, the part that the noise of adaptive counts is by default."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Private:
    """Differentially private training: clipped samples, and Gaussian noise on their sum.

    Choose it where the model, or what sites send, is shown to somebody who must not find out
    whether a sample was trained on (docs/private.md). Pass it to `og.distribute(..., transform=)`,
    with equal settings on every site.

    In each step a site clips the gradient of every sample to the norm C, adds them up, and adds
    its share of the noise, of standard deviation σ C / √S. So the sum over the S sites has noise of
    σ C, of which no site knows all. `param.grad` is this sum over `batch`. Without noise
    (`noise=0`) it only clips, and promises nothing.

    What it promises needs a loss that is a mean over the samples of a site's batch, and batches
    that are drawn as an accountant assumes, as a rule each sample by itself with the same
    probability (Poisson). A batch may then be empty: the site makes the step with it all the same.

    It is called once per step, also where a step starts again. Its noise is never drawn twice: a
    copy of it, and a training that goes on from a checkpoint, have other noise.

    With a `ledger` the session counts each shared step, before its first message, and
    `session.privacy()` tells ε so far. Where the ledger has a budget, all sites stop before the
    same step, by `og.private.BudgetSpentError` from `backward()`.

    Source: Abadi et al., "Deep Learning with Differential Privacy", arXiv 1607.00133.

    Attributes:
        clip: C, the largest norm of a sample's gradient; with "adaptive" the first one.
        noise: σ, the noise multiplier: standard deviation of the noise on the sum over all sites,
            in units of C. With "adaptive" it counts for gradients and counts together.
        batch: expected number of samples (or of other units) per step of all sites together, by
            which the sum is divided. It is a constant, because the number in a batch tells of its
            samples.
        clipping: "flat": the gradient of a sample is clipped as a whole; "per_layer": that of each
            layer by itself, to C / √L with L layers, so that messages start during backward;
            "automatic": every gradient becomes nearly C long, which leaves C to the learning rate;
            "adaptive": flat, with a C that follows a quantile of the norms.
        unit: whose data one clipped gradient is of: "sample", or another word, as "patient", where
            several samples of a batch may be of one. `session.units(ids)` then says before each
            forward whose each sample is, the sum of a unit's gradients is clipped, and `batch`
            counts units. `og.private.PoissonSampler(groups=...)` draws them.
        stability: of "automatic": a gradient of norm n becomes C n / (n + stability) long.
        quantile: of "adaptive": share of the samples whose gradients stay as they are.
        rate: of "adaptive": step of log C per unit by which that share is wrong.
        count_noise: of "adaptive": standard deviation of the noise on the number of samples that
            stay, over all sites; None for a twentieth of `batch`.
        sent_only: whether norms are those of what the method sends of a gradient, and noise is
            drawn for that alone, where all sites know it before the step: with
            `og.RankDAD(reduce="alternate")` the directions that the last sum has left, with
            `og.Sparse(select="random_blocks")` the entries that are drawn (docs/private.md, "Clip
            what is sent"). Choose it with these methods: samples lose less to `clip`.
        bands: b: a step takes back a part of the noise of the b - 1 steps before, so that sums of
            many steps have less of it (docs/private.md, "Noise in bands"). Choose it for few epochs
            at an ε that is not small, with `og.private.CyclicPoissonSampler(..., parts=b)` alone.
            A site keeps b - 1 tensors of the size of each parameter. 1 for independent noise.
        secure: whether noise is made of random bits of the operating system, each number as half
            the sum of four normal ones (Holohan and Braghin, arXiv 2107.10138): for the case that
            somebody computes back from noise to its generator. It takes twenty times as long.
        generator: draws the noise, for an experiment that repeats; of each site its own. Whoever
            knows its seed can subtract the noise. None, the default: one that the operating system
            seeds.
        ledger: counts what is released (docs/ledger.md); at each site an object of its own, with
            equal settings. None: nothing is counted.
        sampling: how batches are drawn, which the ledger has to know: `og.private.Poisson(rate)`,
            `og.private.CyclicPoisson(rate, parts)` with `bands`, `og.private.Fixed(size, rows)`,
            equal on all sites, or this site's DataLoader, of which `og.private.sampling_of` tells
            it. If all sites give their loaders, `batch` is compared
            with what these draw together.
    """

    clip: float
    noise: float
    batch: float
    clipping: Clipping = "flat"
    unit: str = "sample"
    stability: float = 0.01
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None
    sent_only: bool = False
    bands: int = 1
    secure: bool = False
    generator: torch.Generator | None = field(default=None, repr=False, compare=False)
    ledger: Ledger | None = field(default=None, compare=False)
    sampling: Sampling | DataLoader[Any] | None = None
    _expected: float | None = field(init=False, repr=False, compare=False)
    _source: Noise = field(init=False, repr=False, compare=False)
    _threshold: Threshold = field(init=False, repr=False, compare=False)
    _banded: Banded = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ValueError: names the setting and its valid values.
        """
        for name in ("clip", "batch", "stability", "rate"):
            self._require(_positive(getattr(self, name)), name, "a number above 0")
        self._require(self.noise == 0 or _positive(self.noise), "noise", "0 or more")
        known = get_args(Clipping)
        self._require(self.clipping in known, "clipping", f"one of {', '.join(known)}")
        a_word = isinstance(self.unit, str) and bool(self.unit.strip())
        self._require(a_word, "unit", "'sample', or a word as 'patient'")
        self._require(0 < self.quantile < 1, "quantile", "a number between 0 and 1")
        self._require(isinstance(self.bands, int) and self.bands >= 1, "bands", "1 or more")
        follows = self.bands == 1 or (self.noise > 0 and self.clipping != "adaptive")
        self._require(follows, "bands", "1 without noise, and with clipping='adaptive'")
        self._require(not self.sent_only or self.noise > 0, "sent_only", "False without noise")
        apart = not self.sent_only or self.bands == 1
        self._require(apart, "bands", "1 with sent_only: what is sent changes from step to step")
        alone = self.generator is None or not self.secure
        self._require(alone, "generator", "None with secure=True")
        self._check_seed()
        least = self.noise / 2 if self.clipping == "adaptive" else 0.0
        told = f"more than noise / 2 = {least:.3g}, or None with a larger batch"
        enough = not least or self._deviation_of_count > least
        self._require(self.count_noise is None or _positive(self.count_noise), "count_noise", told)
        self._require(enough, "count_noise", told)
        self._settle_sampling()
        noise = source(self.generator, secure=self.secure)
        threshold = Threshold(self.clip, self.quantile, self.rate, self.batch)
        object.__setattr__(self, "_source", noise)
        object.__setattr__(self, "_threshold", threshold)
        object.__setattr__(self, "_banded", Banded(self.bands))

    def _check_seed(self) -> None:
        """Checks that sites whose seeds differ draw other noise.

        Raises:
            ValueError: it is no generator, or takes no more than a part of its seed.
        """
        given = self.generator
        is_one = given is None or isinstance(given, torch.Generator)
        self._require(is_one, "generator", "a torch.Generator with a seed, or None")
        if given is not None and given.device.type == "cpu" and given.initial_seed() >= 1 << 32:
            raise ValueError(
                f"Private: generator has the seed {given.initial_seed()}, of which PyTorch takes "
                f"32 bits on a CPU: sites with other seeds may draw the same noise. Use "
                f"torch.Generator().manual_seed(n) with an n below {1 << 32}, another one at each "
                f"site"
            )

    def restart(self) -> None:
        """Begins another sequence of noise in bands, which takes nothing back of the one before.

        Call it on every site where batches do not go on behind the last one. After a resume, and
        where sites come or go, a session with a `ledger` does it by itself; `load_state_dict` does
        it, too. Where releases are counted by hand, call it when the number of sites has changed.
        """
        self._banded.restart()

    def begin_step(self) -> None:
        """Counts a step of the session, whether or not its noise is sent."""
        self._banded.begin_step()

    @property
    def sequence(self) -> str:
        """Name of the sequence of noise that goes on, for `og.private.Release(sequence=...)`."""
        return self._banded.sequence

    def _settle_sampling(self) -> None:
        """Reads a loader, and checks that ledger and sampling come together."""
        told = "a ledger together with sampling=, og.private.Poisson(rate) or the DataLoader"
        self._require((self.ledger is None) == (self.sampling is None), "ledger", told)
        kind, sampling = "a Ledger, or None", self.sampling
        self._require(self.ledger is None or isinstance(self.ledger, Ledger), "ledger", kind)
        expected = sampling.size if isinstance(sampling, Fixed) else None
        if isinstance(sampling, DataLoader):
            found, expected = sampling_of(sampling), expected_size(sampling)
            object.__setattr__(self, "sampling", found)
        told = (
            "og.private.Poisson(rate), og.private.CyclicPoisson(rate, parts), "
            "og.private.Fixed(size, rows) or a DataLoader"
        )
        known = self.sampling is None or isinstance(self.sampling, Sampling)
        self._require(known, "sampling", told)
        drawn = getattr(self.sampling, "unit", "sample") if self.sampling is not None else self.unit
        self._require(drawn == self.unit, "unit", f"{drawn!r}, which {self.sampling} draws")
        object.__setattr__(self, "_expected", expected)
        if isinstance(self.sampling, Sampling):  # raises where bands do not fit batches
            Release(self.noise, self.sampling, bands=self.bands, sequence="any")

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise ValueError(f"Private: {name}={getattr(self, name)!r}; use {wanted}")

    def __repr__(self) -> str:
        """Shows the settings that have to be given, and those that differ from the defaults."""
        shown = [f for f in fields(self) if f.repr and getattr(self, f.name) != f.default]
        return f"Private({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    # -- what it asks of a session ----------------------------------------------------------------

    @property
    def needs_samples(self) -> bool:
        """True: each is clipped by itself."""
        return True

    @property
    def needs_units(self) -> bool:
        """True where several samples may be of one unit."""
        return self.unit != "sample"

    @property
    def needs_all_layers(self) -> bool:
        """True where the norm is over all layers."""
        return self.clipping != "per_layer"

    @property
    def forms(self) -> bool:
        """True with noise, which has no rows."""
        return self.noise > 0

    @property
    def adds_up(self) -> bool:
        """True: noise and divisor are those of the sum over the sites."""
        return True

    def counter(self) -> StepCounter | None:
        """Returns what counts the steps of a session; None without a ledger."""
        if self.ledger is None:
            return None
        assert isinstance(self.sampling, Sampling)
        about = (self.noise, self.sampling, self.batch, self._expected, self._banded)
        return StepCounter(self.ledger, *about)

    # -- one step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(self, gradient: SiteGradient) -> SiteGradient:
        """Returns S / batch times the clipped sum, with this site's share of the noise on it."""
        if not self.noise:
            units = in_units(gradient)
            scaled = scaled_samples(units, self._factors(gradient, units, sample_norms(units)))
            return replace(gradient, rows=scaled.rows)
        deviation = self._of_gradients * self._limit(1) / math.sqrt(gradient.sites)
        return self._noisy(self._summed(gradient), deviation * _scale(gradient, self.batch))

    @property
    def accumulates(self) -> bool:
        """True if clipped sums of several passes add up, with noise once.

        Not with "adaptive", nor with `sent_only`: should directions change in between, what was
        added before would have no noise on it.
        """
        return self.clipping != "adaptive" and not self.sent_only

    @torch.no_grad()
    def partial(self, gradient: SiteGradient) -> SiteGradient:
        """Returns S / batch times the clipped sum of a pass that is shared later, formed.

        Raises:
            RuntimeError: `param.grad`, in which it waits, has fewer bits than float32.
        """
        for name, p in gradient.params.items() if self.noise else ():
            if torch.finfo(p.dtype).bits < 32:
                raise RuntimeError(
                    f"{self!r}: {name!r} is {p.dtype}, and so is the clipped sum that waits in its "
                    f"grad for the next pass, without noise: one sample could change the rounding "
                    f"of all numbers of it, by more than C. Make each step in one pass, without "
                    f"session.no_sync(), or keep the weights in float32 and compute within "
                    f"torch.autocast"
                )
        return self._summed(gradient)

    def _summed(self, gradient: SiteGradient) -> SiteGradient:
        units = in_units(gradient)
        return weighted_sum(units, self._factors(gradient, units, sample_norms(units)))

    def _factors(self, gradient: SiteGradient, units: SiteGradient, norms_B: Tensor) -> Tensor:
        """Factors of units, by default samples, (B,).

        The gradient is of a mean over this site's samples, of which a unit may have several.
        """
        longest_B = norms_B + roundings(units)  # a norm that is too small would break the promise
        of_sample_B, limit = longest_B * gradient.samples, self._limit(gradient.layers)
        if self.clipping == "automatic":
            factor_B = normalized(of_sample_B, limit, self.stability)
        else:
            factor_B = clipped(of_sample_B, limit)
        if self.clipping == "adaptive":
            self._count(of_sample_B, gradient.sites)
        return factor_B * (gradient.samples * _scale(gradient, self.batch))

    def _limit(self, layers: int) -> float:
        if self.clipping == "per_layer":
            return self.clip / math.sqrt(layers)
        return self._threshold.value

    def _noisy(self, gradient: SiteGradient, deviation: float) -> SiteGradient:
        formed = gradient.formed
        if self.bands == 1 and not gradient.sent:
            wide = [widened(g) for g in formed.values()]
            sums = dict(zip(formed, add_to_all(self._source, wide, deviation), strict=True))
        else:
            about = deviation, gradient
            sums = {name: self._with_noise(name, widened(g), *about) for name, g in formed.items()}
        return replace(
            gradient, formed={name: sums[name].to(g.dtype) for name, g in formed.items()}
        )

    def _with_noise(self, name: str, g: Tensor, deviation: float, gradient: SiteGradient) -> Tensor:
        """Adds noise to a sum: to all of it, or to what is sent of it, which is what is left."""
        sent = (gradient.sent or {}).get(name)
        if sent is not None:
            numbers = add(self._source, sent.coordinates(g.flatten(1)), deviation)
            return sent.matrix(numbers).view(g.shape)
        if self.bands == 1:
            return add(self._source, g, deviation)
        return g + deviation * self._banded.draw(self._source, name, g, gradient.sites)

    # -- adaptive clipping ------------------------------------------------------------------------

    @property
    def _deviation_of_count(self) -> float:
        if self.count_noise is not None or not self.noise:
            return self.count_noise or 0.0
        return self.batch / _COUNTED

    @property
    def _of_gradients(self) -> float:
        """Noise multiplier of gradients: with that of counts, which change by 1/2, it makes σ."""
        if self.clipping != "adaptive":
            return self.noise
        return (self.noise**-2 - (2 * self._deviation_of_count) ** -2) ** -0.5

    def _count(self, norms_B: Tensor, sites: int) -> None:
        nothing = torch.zeros(1, dtype=torch.float64, device=norms_B.device)
        noise = add(self._source, nothing, self._deviation_of_count / math.sqrt(sites))
        self._threshold.count(norms_B, noise[0], sites)

    def tell(self) -> Tensor | None:
        """Returns this site's noisy count and its threshold, float64, (2,); None if not adaptive.

        Raises:
            RuntimeError: nothing was counted.
        """
        return self._threshold.tell() if self.clipping == "adaptive" else None

    def hear(self, total: Tensor) -> None:
        """Moves the threshold by the sum over the sites.

        Raises:
            RuntimeError: sites have different thresholds.
        """
        self._threshold.hear(total)

    @property
    def clip_now(self) -> float:
        """C of the next step: with "adaptive" the threshold, else `clip`."""
        return self._threshold.value

    # -- saved states -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the threshold, for a checkpoint; there is nothing of the noise in it."""
        return {"clip": self._threshold.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with a saved threshold.

        Raises:
            ValueError: it is no threshold, or another `clip` than the one that stays.
        """
        clip: Any = state.get("clip")
        if not _positive(clip):
            raise ValueError(f"Private: a saved clip of {clip!r}: load what state_dict() returned")
        if self.clipping != "adaptive" and clip != self.clip:
            raise ValueError(
                f"Private: a saved clip of {clip!r}, but clip={self.clip!r}: give it the saved one"
            )
        self._threshold.value = float(clip)
        self.restart()

    def __reduce__(self) -> Any:
        """Lets a copy have the settings and the threshold, and noise of its own.

        Raises:
            TypeError: its generator was given, and would draw the same noise in both.
        """
        if self.generator is not None:
            raise TypeError(
                "Private: a copy would draw the same noise from its generator: make another one "
                "with a generator of its own"
            )
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return _again, (settings, self.state_dict())


def _again(settings: Mapping[str, Any], state: Mapping[str, Any]) -> Private:
    private = Private(**settings)
    private.load_state_dict(state)
    return private


def _scale(gradient: SiteGradient, batch: float) -> float:
    """Factor by which sites multiply their sums, so that their mean is the sum over `batch`."""
    return gradient.sites / batch


def _positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
