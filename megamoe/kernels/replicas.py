"""EPLB inside a kernel: from logical ids to physical ones, and the load that is recorded of them."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
import triton
import triton.language as tl

from megamoe.kernels import constants, tuning
from megamoe.kernels.addresses import close_offset_of, offset_of, unsigned

REPLICA_HASH_MULTIPLIER = tl.constexpr(constants.REPLICA_HASH_MULTIPLIER)
LOAD_BINS = tl.constexpr(tuning.LOAD_BINS)
AHEAD_REPLICAS = tl.constexpr(constants.AHEAD_REPLICAS)
COUNTS_OF_SECTOR, COUNTERS_OF_SECTOR = tl.constexpr(4), tl.constexpr(8)  # int64 and int32, in 32 bytes


@triton.jit
def load_record_flags(mapping):
    """(is the load recorded, number of tokens whose load counts).

    Asked for before the ids are mapped: nothing waits for them until then.
    """
    record, num_unpadded = mapping[2:4]
    recording = tl.load(record) != 0
    limit = tl.full((), 1 << 62, tl.int64)
    if num_unpadded is not None:
        limit = tl.load(num_unpadded)
    return recording, limit


@triton.jit
def find_replicas(ids, mask, mapping, CLOSE: tl.constexpr):
    """(pointers to rows of the map, to replica counts, which ids have them: of [0, num_logical), not masked).

    CLOSE: offsets of the map's rows fit 32 bits.
    """
    expert_map, replica_count = mapping[0:2]
    expert_map_stride, _, num_logical, _, replica_count_stride = mapping[4:9]
    valid = mask & (unsigned(ids) < num_logical)
    safe_ids = tl.where(valid, ids, 0).to(tl.uint32)
    if CLOSE:
        row_offset = close_offset_of(safe_ids, expert_map_stride).to(tl.uint64)
    else:
        row_offset = offset_of(safe_ids, expert_map_stride)
    return expert_map + row_offset, replica_count + offset_of(safe_ids, replica_count_stride), valid


@triton.jit
def load_slot(row, slot, slot_stride, valid):
    """Physical experts (int64) in a slot of rows of the map, -1 where not valid; offsets take 64 bits."""
    return tl.load(row + slot.to(tl.int64) * slot_stride, mask=valid, other=-1).to(tl.int64)


@triton.jit
def hash_of(tokens):
    """What chooses a token's replica, in unsigned 32-bit arithmetic: the remainder by the replica count."""
    return tokens.to(tl.uint32) * REPLICA_HASH_MULTIPLIER


@triton.jit
def map_replica(row, counts, tokens, valid, mapping):
    """Physical experts of rows of the map; -1 beyond a row, whose slots end earlier than its count says."""
    slot_stride, _, num_slots = mapping[5:8]
    replica = hash_of(tokens) % tl.maximum(counts, 1).to(tl.uint32)
    return load_slot(row, replica, slot_stride, valid & (replica < num_slots))


@triton.jit
def map_by_count(ids, tokens, mask, mapping, CLOSE: tl.constexpr):
    """Physical ids (int64) of logical ids, whose counts are asked for first; -1 where there are none."""
    row, count, valid = find_replicas(ids, mask, mapping, CLOSE)
    return map_replica(row, tl.load(count, mask=valid, other=1), tokens, valid, mapping)


@triton.jit
def map_replica_of(row, COUNT: tl.constexpr, tokens, valid, mapping, AHEAD: tl.constexpr):
    """`map_replica` of a count that is known while compiling, as is whether the map is that wide."""
    replica = hash_of(tokens) % COUNT
    if COUNT > AHEAD:
        valid = valid & (replica < AHEAD)
    return load_slot(row, replica, mapping[5], valid)


@triton.jit
def short_count(counts):
    """Replica counts below 2^32 as uint32; a negative one becomes larger than AHEAD_REPLICAS."""
    if counts.dtype == tl.int32:
        short = unsigned(counts)
    else:
        short = counts.to(tl.uint32) | ((counts >> 32).to(tl.uint32) & 0x80000000)
    return short


@triton.jit
def map_ahead(row, count, tokens, valid, mapping, AHEAD: tl.constexpr):
    """(counts as `map_replica` wants them and short ones, what it finds for up to AHEAD_REPLICAS).

    For each such count the replica is loaded beside the count, not after it. It halves the way from id to
    physical id, at five loads a slot: for few tokens. AHEAD: AHEAD_REPLICAS, or the map's slots if they are
    fewer; what is not loaded then is -1.
    """
    of_one = map_replica_of(row, 1, tokens, valid, mapping, AHEAD)
    of_two = map_replica_of(row, 2, tokens, valid, mapping, AHEAD)
    of_three = map_replica_of(row, 3, tokens, valid, mapping, AHEAD)
    of_four = map_replica_of(row, 4, tokens, valid, mapping, AHEAD)
    counts = tl.load(count, mask=valid, other=1)
    short = short_count(counts)
    several = tl.where(short == 2, of_two, tl.where(short == 3, of_three, of_four))
    return counts, short, tl.where(short < 2, of_one, several)


@triton.jit
def record_load(program, physical, counted, load, recording, LOAD_PARTS: tl.constexpr, APART: tl.constexpr):
    """Adds a tile's slots to the load, where it is recorded; the order of the additions does not matter.

    counted: the slots that may count; those whose physical id is no counter of the load do not.
    LOAD_PARTS: how many times LOAD_BINS counters the load has, to count in shared memory first; 0 to add slot
    by slot. Additions to the same 32 bytes of the load wait for each other (about 10 ns on an H200), whether
    of one counter or of all eight. Programs begin with different parts, so that they do not meet.
    APART: neighbouring counters belong to neighbouring threads, so that a warp adds to 32 bytes once.
    Otherwise Triton 3.6 gives threads of few warps runs of counters: a warp adds as often as a run is long.
    """
    counters, counters_stride, num_physical = load
    counts = (unsigned(physical) < num_physical) & counted
    if LOAD_PARTS == 0:
        counts = tl.where(recording, counts, False)  # a branch took longer
        tl.atomic_add(counters + physical * counters_stride, 1, mask=counts, sem="relaxed")
    elif recording:
        expert = tl.where(counts, physical, -1).to(tl.int32)
        if APART:  # neighbours in memory may become one thread's: of this stride the compiler knows nothing
            counters_stride = counters_stride * tl.minimum(num_physical, 1)
        for step in range(LOAD_PARTS):
            first = ((program + step) % LOAD_PARTS) * LOAD_BINS
            inside = (expert >= first) & (expert < first + LOAD_BINS)
            found = tl.histogram(tl.where(inside, expert - first, 0), LOAD_BINS, mask=inside)
            bins = first + tl.arange(0, LOAD_BINS)
            hit = (found > 0) & (bins < num_physical)
            tl.atomic_add(counters + bins.to(tl.int64) * counters_stride, found, mask=hit, sem="relaxed")


@triton.jit
def fetch_tables(program, mapping, load, BLOCK: tl.constexpr):
    """Asks for a program's part of the tables, so that it is in the L2 cache when ids arrive, which come from
    memory just as slowly: the sectors of 32 bytes with the first slots of BLOCK experts in the map, their
    counts, and COUNTERS_OF_SECTOR times as many counters. What lies less densely is fetched by its use.

    Volatile, as all that has to come after it must be: the compiler would drop it, or ask for it last.
    """
    expert_map, replica_count = mapping[0:2]
    expert_map_stride, _, num_logical, _, replica_count_stride = mapping[4:9]
    counters, counters_stride, num_physical = load
    index = (program * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    known = index < num_logical
    tl.load(expert_map + offset_of(index, expert_map_stride), mask=known, volatile=True)
    known = known & (index % COUNTS_OF_SECTOR == 0)
    tl.load(replica_count + offset_of(index, replica_count_stride), mask=known, volatile=True)
    counter = index * COUNTERS_OF_SECTOR
    tl.load(counters + offset_of(counter, counters_stride), mask=counter < num_physical, volatile=True)


@triton.jit
def store_physical(
    program,
    ids,
    tokens,
    mask,
    pointers,
    weights,
    mapping,
    load,
    flags,
    CLOSE: tl.constexpr,
    ROUTING: tl.constexpr,
):
    """Stores what slots are mapped to and their weights, at `pointers` to both, and records the load.

    flags: `load_record_flags`. CLOSE, ROUTING: see `find_replicas`, `megamoe.kernels.routing.store_topk`.
    """
    AHEAD: tl.constexpr = ROUTING[3]
    LOAD_PARTS: tl.constexpr = ROUTING[4]
    APART: tl.constexpr = ROUTING[5]
    id_pointers, weight_pointers = pointers
    recording, limit = flags
    recorded = tokens < limit
    if AHEAD == 0:
        physical = map_by_count(ids, tokens, mask, mapping, CLOSE)
        tl.store(weight_pointers, weights, mask=mask)
        tl.store(id_pointers, physical, mask=mask)
        record_load(program, physical, recorded & mask, load, recording, LOAD_PARTS, APART)
    else:
        row, count, valid = find_replicas(ids, mask, mapping, CLOSE)
        counts, short, physical = map_ahead(row, count, tokens, valid, mapping, AHEAD)
        highest = tl.max(short, 0)
        tl.store(weight_pointers, weights, mask=mask)
        done = mask & (short <= AHEAD_REPLICAS)
        tl.store(id_pointers, physical, mask=done)
        record_load(program, physical, recorded & done, load, recording, LOAD_PARTS, APART)
        if highest > AHEAD_REPLICAS:  # rare, and nothing above waits for it
            physical = map_replica(row, counts, tokens, valid, mapping)
            rest = mask & (short > AHEAD_REPLICAS)
            tl.store(id_pointers, physical, mask=rest)
            record_load(program, physical, recorded & rest, load, recording, LOAD_PARTS, APART)
