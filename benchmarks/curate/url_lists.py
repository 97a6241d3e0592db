"""Cost of lists of addresses: opening them, and looking addresses up.

    python benchmarks/curate/url_lists.py --work /tmp/bench [--entries 4000000] [--addresses 200000]

A folder of two categories in the layout of UT1, with made-up domains, and made-up addresses of which a tenth is in a
list. Prints CPU seconds to open the lists, and microseconds per address.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from pipeline.config.curation.curate import UrlListsConfig
from pipeline.data.curate.url_lists import UrlLists, url_list_settings

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def host(chance: random.Random) -> str:
    name = "".join(chance.choices(LETTERS, k=chance.randint(6, 16)))
    return f"{name}.{chance.choice(('com', 'org', 'net', 'co.uk', 'de'))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--entries", type=int, default=4_000_000)
    parser.add_argument("--addresses", type=int, default=200_000)
    options = parser.parse_args()
    chance = random.Random(1)
    listed: list[str] = []
    for category in ("adult", "malware"):
        folder = options.work / "lists" / category
        folder.mkdir(parents=True, exist_ok=True)
        hosts = [host(chance) for _ in range(options.entries // 2)]
        (folder / "domains").write_text("\n".join(hosts))
        listed += hosts[:10_000]
    config = UrlListsConfig(lists=[str(options.work / "lists")])
    expected = url_list_settings(config)
    begin = time.process_time()
    lists = UrlLists(config, expected)
    opened = time.process_time() - begin
    addresses = [
        f"https://www.{chance.choice(listed) if number % 10 == 0 else host(chance)}/news/{number}/page.html?id={number}"
        for number in range(options.addresses)
    ]
    begin = time.process_time()
    hits = sum(int((lists.find(addresses[first : first + 1000]) > 0).sum()) for first in range(0, len(addresses), 1000))
    seconds = time.process_time() - begin
    print(
        f"{options.entries:,} entries: {opened:.1f} CPU s to open; {1e6 * seconds / len(addresses):.1f} microseconds "
        f"per address of {len(addresses):,}, of which {hits:,} are in a list"
    )


if __name__ == "__main__":
    main()
