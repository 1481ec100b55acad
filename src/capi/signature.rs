use std::{mem::MaybeUninit, sync::Arc};

use super::{
    CountsHandle, SignatureHandle, Status, args,
    calibration::{Basis, check_same_mask},
    counts::OpenCounts,
    failure::{guard, guard_done},
    handles::{self, Class},
};
use crate::signature::Signature;

pub(super) struct OpenSignature {
    pub(super) basis: Arc<Basis>,
    pub(super) signature: Signature,
}

impl Class for OpenSignature {
    const NAME: &'static str = "eldr_signature";
    type Handle = SignatureHandle;
}

/// Opens the signature of counts in `out`: a vector of length 1, which the caller frees. Any thread; the counts may be
/// freed before.
///
/// ELDR_STATUS_NO_SIGNATURE, and NULL in `out`, if nothing counted weighs anything: route with NULL then, by load.
/// Errors: ELDR_STATUS_TAP if the layers have counted different tokens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_signature_open(
    counts: *const CountsHandle,
    out: Option<&mut MaybeUninit<*mut SignatureHandle>>,
) -> Status {
    guard(|| {
        let out = args::need(out, "out")?;
        let counts = handles::get::<OpenCounts>(counts)?;
        counts.n_tokens()?;
        let basis = Arc::clone(&counts.basis);
        let signature = basis.calibration.signature(&counts.counts.lock());
        let Some(signature) = signature else {
            out.write(std::ptr::null_mut());
            return Ok(Status::NoSignature);
        };
        out.write(handles::insert(OpenSignature { basis, signature }));
        Ok(Status::Ok)
    })
}

/// Copies the signature's entries, a row of experts for each layer used, to `values`, which has room for `room`; writes
/// to `n`, unless it is NULL, how many there are. Any thread.
///
/// Errors: ELDR_STATUS_BUFFER for too little room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_signature_get_values(
    signature: *const SignatureHandle,
    values: *mut f32,
    room: usize,
    n: Option<&mut MaybeUninit<usize>>,
) -> Status {
    guard_done(|| {
        let signature = handles::get::<OpenSignature>(signature)?;
        // SAFETY: the caller says that there is room for `room`.
        unsafe { args::copy_out(signature.signature.as_slice(), values, room, n) }
    })
}

/// Writes how alike two signatures are to `cosine`: 1 if they point the same way, 0 if they share no expert. Any thread.
///
/// Errors: ELDR_STATUS_MISMATCH for signatures of different calibrations.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_signature_compare(
    a: *const SignatureHandle,
    b: *const SignatureHandle,
    cosine: Option<&mut MaybeUninit<f32>>,
) -> Status {
    guard_done(|| {
        let (a, b) = (handles::get::<OpenSignature>(a)?, handles::get::<OpenSignature>(b)?);
        check_same_mask(&a.basis, &b.basis, "second eldr_signature")?;
        args::put(cosine, a.signature.cosine(b.signature.as_slice()), "cosine")
    })
}

/// Frees the handle; NULL is let pass. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_signature_free(signature: *mut SignatureHandle) -> Status {
    guard_done(|| handles::remove::<OpenSignature>(signature).map(drop))
}
