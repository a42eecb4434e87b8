"""What the kernel's tables say of connections; those of a link that is cut are in tests/hosts."""

from pathlib import Path

from services.contract.messages.base import Address
from services.worker.agent.host.connections import _sent_again, unanswered

# As Linux on a little-endian machine writes them: open and sent again four times; a peer that does not read (a
# timer of probes); nothing under way; being opened and sent again; the same by IPv6, and IPv4 within it.
TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0300470A:1267 0400470A:A1B2 01 00000060:00000000 01:0000004D 00000004     0        0 101 2 0 20 4 30 10 -1
   1: 0300470A:1268 0400470A:A1B2 01 00000060:00000000 04:0000004D 00000004     0        0 102 2 0 20 4 30 10 -1
   2: 0300470A:1269 0400470A:A1B2 01 00000000:00000000 00:00000000 00000000     0        0 103 1 0 20 4 30 10 -1
   3: 0300470A:126A 0400470A:A1B2 02 00000001:00000000 01:0000004D 00000002     0        0 104 2 0 20 4 30 10 -1
   4: 000071FD000000000000000003000000:1267 000071FD000000000000000004000000:A1B2 01 00000060:00000000 01:0000004D 00000003     0        0 105 2 0
   5: 0000000000000000FFFF00000300470A:1267 0000000000000000FFFF00000400470A:A1B2 01 00000060:00000000 01:0000004D 00000005     0        0 106 2 0
a line that is none
"""


def test_connections_on_which_is_sent_again_are_told_with_their_ends(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(TABLE)
    found = dict(_sent_again(table))
    assert list(found) == ["101", "104", "105", "106"]
    assert found["101"].here == Address(host="10.71.0.3", port=0x1267)
    assert found["101"].there == Address(host="10.71.0.4", port=0xA1B2)
    assert (found["101"].retries, found["101"].waiting_bytes, found["101"].is_open) == (4, 96, True)
    assert not found["104"].is_open
    assert found["106"].here.host == "10.71.0.3"


def test_a_process_that_is_gone_has_none(tmp_path: Path) -> None:
    assert list(_sent_again(tmp_path / "none")) == []
    (tmp_path / "ending").touch()
    assert list(_sent_again(tmp_path / "ending")) == []
    assert unanswered(1 << 22) == ()
