"""What the planner knows of a device: a handful of numbers, read from the device where there is
one.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device as the planner sees it.

    workers: how many splits run at once (SMs or AI cores, times resident programs; CPU threads).
    read_bandwidth: bytes per second that all workers together read from device memory.
    launch_seconds: cost of one more launch; merge_seconds: cost of merging one more state row [Dv]
        by one worker.
    tile_tokens: tokens of one tile; splits are cut on its multiples.
    split_seconds: what a worker loses between one split and the next.
    alone: a worker reads at most 1 / alone times as fast as its share of the bandwidth, however few
        others read. neighbours, together: so many workers share a core (programs a multiprocessor),
        which reads at most 1 / together times as fast as its own share.
    source: where each number comes from, or the word "assumed".
    """

    name: str
    workers: int
    read_bandwidth: float
    launch_seconds: float
    merge_seconds: float
    tile_tokens: int
    source: str = field(compare=False)
    split_seconds: float = 0.0
    alone: float = 1.0
    neighbours: int = 1
    together: float = 1.0

    def __post_init__(self) -> None:
        if self.workers < 1 or self.tile_tokens < 1:
            raise ValueError(
                f"workers and tile_tokens must be 1 or more, got {self.workers} and "
                f"{self.tile_tokens}"
            )
        if not (self.read_bandwidth > 0 and self.launch_seconds >= 0 and self.merge_seconds >= 0):
            raise ValueError(
                f"read_bandwidth must be above 0 and costs 0 or more, got {self.read_bandwidth}, "
                f"{self.launch_seconds}, {self.merge_seconds}"
            )
        if not (self.split_seconds >= 0 and 0 < self.alone <= 1 and 0 < self.together <= 1):
            raise ValueError(
                "split_seconds must be 0 or more, alone and together above 0 and at most 1, got "
                f"{self.split_seconds}, {self.alone}, {self.together}"
            )
        if self.neighbours < 1 or self.workers % self.neighbours:
            raise ValueError(
                f"neighbours must divide the {self.workers} workers, got {self.neighbours}"
            )


def _ascend(name: str, cores: int, bandwidth: float, bandwidth_source: str) -> DeviceProfile:
    return DeviceProfile(
        name,
        workers=cores,
        read_bandwidth=bandwidth,
        launch_seconds=10e-6,
        merge_seconds=1e-8,
        tile_tokens=128,
        source="cube cores: target table of bishengir-compile 1.2.0; "
        f"bandwidth: {bandwidth_source}; costs: assumed; "
        "tile: 128, the page size that every Ascend stack uses",
    )


CPU = DeviceProfile(
    "cpu",
    workers=2,
    read_bandwidth=20e9,
    launch_seconds=20e-6,
    merge_seconds=2e-8,
    tile_tokens=256,
    source="assumed; workers are read from torch.get_num_threads() by the cpu backend",
)
H200 = DeviceProfile(
    "NVIDIA H200",
    workers=264,
    read_bandwidth=4.6e12,
    launch_seconds=2.5e-6,
    merge_seconds=5e-7,
    tile_tokens=64,
    source="2 programs on each of 132 SMs, read from the device; 4.6 TB/s: a read-only kernel over "
    "0.5 GB; costs: kernels timed with 1 to 33 splits; all on an H200",
    split_seconds=1.5e-6,
    alone=0.52,
    neighbours=2,
    together=0.85,
)
A100 = DeviceProfile(
    "NVIDIA A100",
    workers=216,
    read_bandwidth=1.8e12,
    launch_seconds=3e-6,
    merge_seconds=5e-7,
    tile_tokens=64,
    source="2 programs on each of 108 SMs (of 65 KB at head dim 128, in 164 KB of shared memory) "
    "and 2.0 TB/s (80 GB part): vendor datasheet, derated to 90 %; costs: assumed",
    split_seconds=1.5e-6,
    alone=0.52,
    neighbours=2,
    together=0.85,
)
ASCEND_910B1 = _ascend("Ascend910B1", 24, 1.4e12, "assumed")
ASCEND_910B3 = _ascend("Ascend910B3", 20, 1.4e12, "assumed")
ASCEND_910B4 = _ascend("Ascend910B4", 20, 0.7e12, "assumed")
ASCEND_910_93 = _ascend("Ascend910_93", 24, 1.4e12, "assumed, one die")

PROFILES: dict[str, DeviceProfile] = {
    profile.name: profile
    for profile in (CPU, H200, A100, ASCEND_910B1, ASCEND_910B3, ASCEND_910B4, ASCEND_910_93)
}
