"""The gangs of a run: the learner, and a critic and a reference where there are any. They work in turns, under the same leases."""

from __future__ import annotations

from collections.abc import Callable

from rlhfless_ray.functions.pool import Pool
from rlhfless_ray.learn.gang import Gang
from rlhfless_ray.learn.recovery import Recovery
from rlhfless_ray.site import Site
from rlhfless_ray.types import WeightVersion

OF_CRITIC = "critic_"  # names of a checkpoint's files begin with it
APART_S = 2.0  # for devices that nobody works on


class Gangs:
    def __init__(self, site: Site, learner: Gang, critic: Gang | None, reference: Gang | None) -> None:
        self.site, self.learner, self.critic, self.reference = site, learner, critic, reference
        self.keeps_gradients = False  # the learner has some, made ahead: on GPU it stays on its devices

    @property
    def alone(self) -> bool:
        """Whether nobody but the learner works in the phase."""
        return self.critic is None and self.reference is None

    @property
    def learners(self) -> list[Gang]:
        return [self.learner] if self.critic is None else [self.learner, self.critic]

    @property
    def all(self) -> list[Gang]:
        return self.learners if self.reference is None else [*self.learners, self.reference]

    def turn(self, gang: Gang) -> None:
        """It works from here on, under the slots of the one that worked before it."""
        site = self.site
        for other in self.all:
            holds = other is self.learner and self.keeps_gradients and site.leases.resource == "gpu"  # gradients, on its devices
            if other is not gang and other.working and not holds:
                site.spare += other.park()
        spare = site.handed()
        if not gang.working:  # on GPU it may have kept its devices, with gradients on them
            spare = gang.staff(spare)
        # the learner comes after the others: what it will want is kept for it
        kept = 0 if gang is self.learner else max(0, self.learner.slots - sum(len(i.leases) for i in gang.by_rank))
        site.leases.release(spare[kept:])
        site.spare = spare[:kept]

    # ---- their life -------------------------------------------------------------------------------------------

    def safe(self, weights: WeightVersion) -> WeightVersion:
        """The version from where engines can have it, before they are asked to. Between phases: it may take leases to publish it
        once more."""
        safe = self.learner.safe(weights)
        if self.learner.working:
            self.site.spare += self.learner.park()
        return safe

    def open_reference(self, files: dict[str, bytes], loopback: bool) -> None:
        """Load the policy that the run began with, from its files, and park it."""
        if self.reference is None:
            return
        import ray

        site, held, ranks = self.site, [], self.reference.ranks
        if site.leases.resource == "gpu":  # gradients made ahead keep the learner's devices: it shares them only if there are no others
            held = site.handed()
            site.spare = site.leases.collect(site.leases.ask(ranks), self.reference.pool.kind, APART_S)
            if len(site.spare) < ranks:
                site.spare, held = [*site.spare, *held], []
        self.turn(self.reference)
        self.reference.build(lambda: ray.put(files), loopback, None)
        site.spare += [*self.reference.park(), *held]

    def open_critic(self, files: dict[str, bytes], loopback: bool, checkpoint: dict[str, bytes] | None) -> None:
        """Load it from a model folder's files, or go on from a checkpoint's, and park it."""
        if self.critic is None:
            return
        import ray

        state = None if checkpoint is None else _of_critic(checkpoint)
        self.turn(self.critic)
        self.critic.build(lambda: ray.put(files), loopback, ray.put(state) if state else None)
        self.site.spare += self.critic.park()

    def snapshot(self, deadline_s: float | None = None) -> dict[str, bytes]:
        """Files of all that learns; the critic's have names of their own."""
        asked = [(gang, gang.ask_snapshot()) for gang in self.learners]
        found: dict[str, bytes] = {}
        for gang, refs in asked:
            prefix = OF_CRITIC if gang is self.critic else ""
            found |= {prefix + name: content for name, content in gang.snapshot(deadline_s, refs).items()}
        return found

    @property
    def kept_now(self) -> bool:
        """Whether the state of now lies outside of the processes, or will in a moment."""
        return all(gang.recovery.has_now for gang in self.learners)

    def keep(self) -> None:
        """The state of now, outside of the processes, if it is time to."""
        for gang in self.learners:
            gang.keep()

    def recovers(self, every_steps: int, say: Callable[[str], None]) -> None:
        """From lost processes: `every_steps`, see `Recovery`; `say`: tells of it."""
        for gang in self.all:
            gang.recovery = Recovery(every_steps)
            gang.recovery.say = say

    def saved(self, load: Callable[[], dict[str, bytes]]) -> None:
        """What `snapshot` gave is on disk now; `load` reads it."""
        self.learner.recovery.saved(load)
        if self.critic is not None:
            self.critic.recovery.saved(lambda: _of_critic(load()))

    def pools(self) -> list[Pool]:
        return [gang.pool for gang in self.all]

    def forget(self) -> None:
        """The processes are gone."""
        for gang in self.all:
            gang.forget()

    def policy_model(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """The policy as a model folder, adapters merged; `files`: tokenizer and whatever else goes with it."""
        return {**files, "model.safetensors": self._merged(self.learner)}

    def critic_model(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """The same of the critic."""
        assert self.critic is not None
        adapts = self.site.recipe.lora.rank > 0
        weights = self._merged(self.critic) if adapts else self.critic.snapshot()["model.safetensors"]
        return {**files, "config.json": self.critic.config(), "model.safetensors": weights}

    def _merged(self, gang: Gang) -> bytes:
        self.turn(gang)
        weights = gang.model()
        self.site.spare += gang.park()
        return weights


def _of_critic(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name.removeprefix(OF_CRITIC): content for name, content in files.items() if name.startswith(OF_CRITIC)}
