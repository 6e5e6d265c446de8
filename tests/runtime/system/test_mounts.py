"""Which file system a path is on, by a table of mounts."""

from pathlib import Path

from penstock.runtime.system.limits import Mount, find_mount

TABLE = r"""
/dev/vda / ext4 rw 0 0
proc /proc proc rw 0 0
/dev/old /data xfs rw 0 0
/dev/nvme0n1 /data xfs rw 0 0
tmpfs /data/with\040a\040blank tmpfs rw 0 0
""".strip()


def test_the_innermost_mount_holds_a_path_and_the_last_one_covers_others(tmp_path):
    table = tmp_path / "mounts"
    table.write_text(TABLE)
    assert find_mount(Path("/srv/weights"), table) == Mount("ext4", "/dev/vda")
    assert find_mount(Path("/data/weights"), table) == Mount("xfs", "/dev/nvme0n1")
    assert find_mount(Path("/database"), table) == Mount("ext4", "/dev/vda")
    assert find_mount(Path("/data/with a blank/x"), table).kind == "tmpfs"
    assert find_mount(Path("/data"), tmp_path / "nowhere") == Mount("", "")
