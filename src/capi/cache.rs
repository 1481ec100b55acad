use std::{mem::MaybeUninit, ops::Range, sync::Arc};

use parking_lot::Mutex;

use super::{
    CacheHandle, CalibrationHandle, CountsHandle, Status, TapHandle, args,
    calibration::{Basis, OpenCalibration, check_same, experts},
    counts::OpenCounts,
    failure::{Failure, guard_done},
    handles::{self, Class},
    rows::Rows,
    tap::OpenTap,
};
use crate::signature::ExpertCounts;

pub(super) struct OpenCache {
    basis: Arc<Basis>,
    rows: Mutex<Rows>,
}

impl Class for OpenCache {
    const NAME: &'static str = "eldr_cache";
    type Handle = CacheHandle;
}

/// llama.cpp's range of positions: below 0 is from the start, and to the end.
fn range(p0: i32, p1: i32) -> Range<i32> {
    p0.max(0)..if p1 < 0 { i32::MAX } else { p1 }
}

/// Refuses a sequence that is none: only eldr_cache_seq_rm() takes -1, for all of them.
fn check_sequence(seq: i32) -> Result<(), Failure> {
    if seq < 0 {
        return Err(Failure::new(Status::Argument, format!("there is no sequence {seq}; pass 0 or more")));
    }
    Ok(())
}

/// Refuses tokens that are nowhere.
fn check_place(seq: i32, pos: i32, n: usize) -> Result<(), Failure> {
    check_sequence(seq)?;
    let end = i32::try_from(n).ok().and_then(|n| pos.checked_add(n));
    if pos < 0 || end.is_none() {
        let why = format!("{n} tokens can not be at position {pos}; positions are 0 to {}", i32::MAX - 1);
        return Err(Failure::new(Status::Argument, why));
    }
    Ok(())
}

/// Opens an empty cache in `out`, which the caller frees: it keeps the picks of what is in the host's KV cache, if the
/// host makes every call on its memory here, too. Then a prompt whose start was in the cache has the counts, and so the
/// signature, of one prefilled whole. Any thread; the calibration's handle may be freed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_cache_open(
    calibration: *const CalibrationHandle,
    out: Option<&mut MaybeUninit<*mut CacheHandle>>,
) -> Status {
    guard_done(|| {
        let out = args::need(out, "out")?;
        let basis = Arc::clone(&handles::get::<OpenCalibration>(calibration)?.0);
        let shape = basis.shape();
        let rows = Rows::new(basis.layers.len(), shape.n_expert as usize, shape.n_expert_used as usize);
        out.write(handles::insert(OpenCache { rows: Mutex::new(rows), basis }));
        Ok(())
    })
}

/// Notes the picks of `n_tokens` tokens of sequence `seq` from position `pos` on: tokens `first` and after it of the
/// batch the tap has just read. What was noted at these positions is forgotten. Any thread.
///
/// Errors: as eldr_counts_add_tap(), and ELDR_STATUS_ARGUMENT for a sequence or positions that are none.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_cache_add_tap(
    cache: *mut CacheHandle,
    seq: i32,
    pos: i32,
    tap: *const TapHandle,
    first: usize,
    n_tokens: usize,
) -> Status {
    guard_done(|| {
        let (cache, tap) = (handles::get::<OpenCache>(cache)?, handles::get::<OpenTap>(tap)?);
        check_same(&cache.basis, &tap.basis, "tap")?;
        check_place(seq, pos, n_tokens)?;
        let mut picks = Vec::with_capacity(cache.basis.layers.len());
        tap.picks(first, n_tokens, |_, experts| picks.push(experts.to_vec()))?;
        cache.rows.lock().put(seq, pos, n_tokens, |layer| &picks[layer]);
        Ok(())
    })
}

/// Like eldr_cache_add_tap(), from ids: `experts` has, for each layer of eldr_calibration_get_layers() in its order,
/// n_expert_used ids for each token. Any thread.
///
/// Errors: ELDR_STATUS_ARGUMENT for an id that is no expert and for a sequence or positions that are none; then nothing
/// is noted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_cache_add(
    cache: *mut CacheHandle,
    seq: i32,
    pos: i32,
    experts: *const i32,
    n_tokens: usize,
) -> Status {
    guard_done(|| {
        let cache = handles::get::<OpenCache>(cache)?;
        check_place(seq, pos, n_tokens)?;
        let shape = cache.basis.shape();
        let n_row = n_tokens * shape.n_expert_used as usize;
        // SAFETY: the caller passes k ids for each token in each layer.
        let ids = unsafe { args::values(experts, n_row * cache.basis.layers.len(), "experts") }?;
        let ids = self::experts(ids, shape.n_expert)?;
        cache.rows.lock().put(seq, pos, n_tokens, |layer| &ids[layer * n_row..][..n_row]);
        Ok(())
    })
}

/// To call with llama_memory_seq_rm(), if that returned true: forgets positions `p0` to `p1` - 1 of `seq`; below 0 they
/// are the first and the last, and a `seq` below 0 is every sequence. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_cache_seq_rm(cache: *mut CacheHandle, seq: i32, p0: i32, p1: i32) -> Status {
    guard_done(|| {
        let cache = handles::get::<OpenCache>(cache)?;
        cache.rows.lock().remove((seq >= 0).then_some(seq), &range(p0, p1));
        Ok(())
    })
}

/// To call with llama_memory_seq_cp(): positions `p0` to `p1` - 1 of `from` belong to `to`, too. Any thread.
///
/// Errors of this and the next two: ELDR_STATUS_ARGUMENT for a sequence below 0.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_cache_seq_cp(cache: *mut CacheHandle, from: i32, to: i32, p0: i32, p1: i32) -> Status {
    guard_done(|| {
        let cache = handles::get::<OpenCache>(cache)?;
        check_sequence(from.min(to))?;
        cache.rows.lock().copy(from, to, &range(p0, p1));
        Ok(())
    })
}

/// To call with llama_memory_seq_keep(): forgets every sequence but `seq`. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_cache_seq_keep(cache: *mut CacheHandle, seq: i32) -> Status {
    guard_done(|| {
        let cache = handles::get::<OpenCache>(cache)?;
        check_sequence(seq)?;
        cache.rows.lock().keep(seq);
        Ok(())
    })
}

/// To call with llama_memory_seq_add(): moves positions `p0` to `p1` - 1 of `seq` by `delta`. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_cache_seq_add(cache: *mut CacheHandle, seq: i32, p0: i32, p1: i32, delta: i32) -> Status {
    guard_done(|| {
        let cache = handles::get::<OpenCache>(cache)?;
        check_sequence(seq)?;
        cache.rows.lock().shift(seq, &range(p0, p1), delta);
        Ok(())
    })
}

/// To call with llama_memory_clear(): forgets everything. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_cache_clear(cache: *mut CacheHandle) -> Status {
    guard_done(|| {
        handles::get::<OpenCache>(cache)?.rows.lock().clear();
        Ok(())
    })
}

/// Adds the picks of positions `p0` to `p1` - 1 of `seq` to `counts`, and writes to `n_tokens`, unless it is NULL, how
/// many of them were known. Any thread.
///
/// Errors: ELDR_STATUS_MISMATCH for counts of another calibration, ELDR_STATUS_ARGUMENT for a sequence below 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_cache_get_counts(
    cache: *const CacheHandle,
    seq: i32,
    p0: i32,
    p1: i32,
    counts: *mut CountsHandle,
    n_tokens: Option<&mut MaybeUninit<u32>>,
) -> Status {
    guard_done(|| {
        let (cache, counts) = (handles::get::<OpenCache>(cache)?, handles::get::<OpenCounts>(counts)?);
        check_same(&cache.basis, &counts.basis, "eldr_counts")?;
        check_sequence(seq)?;
        let (n, rows) = cache.rows.lock().counts(seq, &range(p0, p1));
        counts.counts.lock().merge(&ExpertCounts::from_rows(
            &cache.basis.layers,
            cache.basis.shape().n_expert,
            n,
            rows,
        ));
        if let Some(n_tokens) = n_tokens {
            n_tokens.write(n);
        }
        Ok(())
    })
}

/// Writes the bytes of memory that the picks take to `n_bytes`; what sequences share counts once. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_cache_get_bytes(
    cache: *const CacheHandle,
    n_bytes: Option<&mut MaybeUninit<usize>>,
) -> Status {
    guard_done(|| {
        let cache = handles::get::<OpenCache>(cache)?;
        let bytes = cache.rows.lock().n_bytes();
        args::put(n_bytes, bytes, "n_bytes")
    })
}

/// Frees the handle; NULL is let pass. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_cache_free(cache: *mut CacheHandle) -> Status {
    guard_done(|| handles::remove::<OpenCache>(cache).map(drop))
}
