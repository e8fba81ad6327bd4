"""Executables that stand in for a host's tools, and the collector run among them as a host would run it."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from ddtree_ops.doctor.collector import parse, script

GPU = """\
<gpu id="00000000:{bus}:00.0"><product_name>NVIDIA RTX PRO 6000 Blackwell Server Edition</product_name>
<persistence_mode>Enabled</persistence_mode><mig_mode><current_mig>N/A</current_mig></mig_mode>
<pci><pci_bus_id>00000000:{bus}:00.0</pci_bus_id><pci_gpu_link_info><pcie_gen><max_link_gen>5</max_link_gen>
<current_link_gen>1</current_link_gen></pcie_gen><link_widths><max_link_width>16x</max_link_width>
<current_link_width>16x</current_link_width></link_widths></pci_gpu_link_info></pci>
<clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
<clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown></clocks_event_reasons>
<fb_memory_usage><total>97887 MiB</total><used>4 MiB</used></fb_memory_usage><compute_mode>Default</compute_mode>
<utilization><gpu_util>0 %</gpu_util></utilization><ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
<ecc_errors><volatile><sram_correctable>7</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
<dram_uncorrectable>N/A</dram_uncorrectable></volatile></ecc_errors>
<remapped_rows><remapped_row_pending>No</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
</remapped_rows><temperature><gpu_temp>41 C</gpu_temp></temperature>
<gpu_power_readings><current_power_limit>600.00 W</current_power_limit><default_power_limit>600.00 W
</default_power_limit></gpu_power_readings><fabric><state>N/A</state><status>N/A</status></fabric>
<processes>{processes}</processes></gpu>"""
PROCESS = """<process_info><pid>{pid}</pid><type>C</type><process_name>python3</process_name>
<used_memory>321 MiB</used_memory></process_info>"""
BUSES = ("01", "21", "41", "61", "81", "A1", "C1", "E1")


def smi_xml(processes: str = "") -> str:
    """What ``nvidia-smi -q -x`` says of eight cards, in the form that its documentation and drivers 550-580 have."""
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>'
    cards = "\n".join(GPU.format(bus=bus, processes=processes if bus == "01" else "") for bus in BUSES)
    versions = "<driver_version>580.95.05</driver_version><cuda_version>13.0</cuda_version>"
    return f"{head}{versions}<attached_gpus>8</attached_gpus>\n{cards}\n</nvidia_smi_log>\n"


def smi_topo() -> str:
    """What ``nvidia-smi topo -m`` draws, its legend and affinities included."""
    names = "\t".join(f"GPU{index}" for index in range(8))
    rows = [
        f"GPU{row}\t" + "\t".join(" X " if row == at else "NODE" if (row < 4) == (at < 4) else "SYS" for at in range(8))
        for row in range(8)
    ]
    rows = [f"{row}\t0-63\t0\t\tN/A" for row in rows]
    return f"\t{names}\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n" + "\n".join(rows) + "\n\nLegend:\n\n  X    = Self\n"


def smi_p2p() -> str:
    """What ``nvidia-smi topo -p2p r`` draws."""
    head = " \t" + "\t".join(f"GPU{index}" for index in range(8)) + "\t"
    rows = [f" GPU{row}\t" + "\t".join("X" if row == at else "OK" for at in range(8)) + "\t" for row in range(8)]
    return f"{head}\n" + "\n".join(rows) + "\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"


class Host:
    """A directory of executables that the collector finds before the machine's own."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.home = directory / "home"
        self.bin.mkdir()
        self.home.mkdir()

    def tool(self, name: str, shell: str) -> None:
        """An executable out of a few lines of shell."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{shell}\n", encoding="utf-8")
        path.chmod(0o755)

    def file(self, name: str, text: str | bytes) -> Path:
        path = self.home / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def nvidia_smi(self, query: str = "", topo: str = "", peers: str = "", cards: str = "") -> None:
        """nvidia-smi by what it is asked; each answer is a shell command, by default the healthy one."""
        xml, matrix, p2p = self.file("xml", smi_xml()), self.file("topo", smi_topo()), self.file("p2p", smi_p2p())
        rows = self.file("cap", "".join(f"00000000:{bus}:00.0, 12.0\n" for bus in BUSES))
        self.tool(
            "nvidia-smi",
            f'case "$*" in\n"-q -x") {query or f"cat {xml}"};;\n"topo -m") {topo or f"cat {matrix}"};;\n'
            f'"topo -p2p "*) {peers or f"cat {p2p}"};;\n*compute_cap*) {cards or f"cat {rows}"};;\n*) exit 6;;\nesac',
        )

    def collect(
        self, request: dict[str, Any] | None = None, *, path: str = "/usr/bin:/bin", user: int | None = None
    ) -> tuple[dict[str, Any], float]:
        """The collector's reply and how long it took in seconds, run as ``sh -s`` with the script by stdin."""
        began = time.monotonic()
        done = subprocess.run(
            ["/bin/sh", "-s", "--", json.dumps(request or {})],
            input=script().encode(),
            capture_output=True,
            env={"PATH": f"{self.bin}:{path}" if path else str(self.bin), "HOME": str(self.home)},
            cwd="/",
            timeout=60,
            check=False,
            **({} if user is None else {"user": user, "group": user, "extra_groups": []}),
        )
        took = time.monotonic() - began
        assert done.returncode == 0, done.stderr.decode()
        return parse(done.stdout, "the collector", done.stderr.decode(errors="replace")), took
