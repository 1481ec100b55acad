//! Where the fields of the host's `ggml_tensor` are, and whether that is true.
//!
//! Never assumes a layout: the host's compiler says where the fields are, and the ggml that runs must agree.

use std::ffi::{CStr, c_char, c_void};

use super::{Status, failure::Failure};

/// ggml's tensor; eldr knows nothing of it but what eldr_tensor_layout says.
#[repr(C)]
pub struct ggml_tensor {
    _never_read: [u8; 0],
}

/// Where the fields of struct ggml_tensor are, in bytes, as the host's compiler laid it out: ELDR_TENSOR_LAYOUT_INIT
/// fills it where ggml.h is included before eldr.h.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TensorLayout {
    /// sizeof(struct ggml_tensor).
    pub n_bytes: usize,
    /// Of `type`, 4 bytes.
    pub offset_type: usize,
    /// Of `ne`, four int64_t.
    pub offset_ne: usize,
    /// Of `nb`, four size_t.
    pub offset_nb: usize,
    /// Of `name`.
    pub offset_name: usize,
    /// GGML_MAX_NAME.
    pub n_name: usize,
    /// GGML_TYPE_I32.
    pub type_i32: i32,
}

/// Most bytes a tensor's description may have: far above any ggml's.
const MAX_BYTES: usize = 4096;
/// Names such as `ffn_moe_topk-1000` must fit.
const MIN_NAME: usize = 32;

/// ggml_get_name.
pub type GetName = Option<unsafe extern "C" fn(tensor: *const ggml_tensor) -> *const c_char>;
/// ggml_nbytes.
pub type GetBytes = Option<unsafe extern "C" fn(tensor: *const ggml_tensor) -> usize>;
/// ggml_backend_tensor_get.
pub type TensorGet =
    Option<unsafe extern "C" fn(tensor: *const ggml_tensor, data: *mut c_void, offset: usize, size: usize)>;

/// The host's functions, none missing.
#[derive(Clone, Copy)]
pub(super) struct Ggml {
    pub get_name: unsafe extern "C" fn(*const ggml_tensor) -> *const c_char,
    pub n_bytes: unsafe extern "C" fn(*const ggml_tensor) -> usize,
    pub tensor_get: unsafe extern "C" fn(*const ggml_tensor, *mut c_void, usize, usize),
}

/// What a node of the graph looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Node {
    pub kind: i32,
    pub ne: [i64; 4],
    pub nb: [usize; 4],
}

impl TensorLayout {
    /// Refuses a layout that no compiler could have made.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let fields = [
            ("type", self.offset_type, 4, 4),
            ("ne", self.offset_ne, 32, 8),
            ("nb", self.offset_nb, 32, 8),
            ("name", self.offset_name, self.n_name, 1),
        ];
        let wrong = |why: String| {
            Err(Failure::new(
                Status::Layout,
                format!(
                    "{why}; include the ggml.h of the ggml that runs and fill the layout by ELDR_TENSOR_LAYOUT_INIT"
                ),
            ))
        };
        if self.n_bytes > MAX_BYTES || self.n_name < MIN_NAME {
            return wrong(format!("a ggml_tensor of {} bytes with a name of {} is none", self.n_bytes, self.n_name));
        }
        for (at, &(name, offset, n_bytes, align)) in fields.iter().enumerate() {
            if offset % align != 0 || offset.checked_add(n_bytes).is_none_or(|end| end > self.n_bytes) {
                return wrong(format!("`{name}` can not be at {offset} of {} bytes", self.n_bytes));
            }
            for &(other, start, length, _) in &fields[..at] {
                if offset < start + length && start < offset + n_bytes {
                    return wrong(format!("`{name}` and `{other}` overlap"));
                }
            }
        }
        Ok(())
    }

    /// The tensor's name, if it lies where the layout says.
    ///
    /// # Safety
    /// `tensor` is a tensor of the host's ggml, alive for `'a`, and `get_name` is that ggml's.
    pub(super) unsafe fn name<'a>(&self, tensor: *const ggml_tensor, ggml: &Ggml) -> Result<&'a CStr, String> {
        // SAFETY: the caller passes a tensor of the ggml whose function this is.
        let said = unsafe { (ggml.get_name)(tensor) };
        let want = tensor.addr().wrapping_add(self.offset_name);
        if said.addr() != want {
            return Err(format!(
                "ggml keeps a tensor's name {} bytes into it, and the layout says {}",
                said.addr().wrapping_sub(tensor.addr()).cast_signed(),
                self.offset_name
            ));
        }
        // SAFETY: ggml itself says that its name is there, and the layout that it has so many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(said.cast::<u8>(), self.n_name) };
        CStr::from_bytes_until_nul(bytes).map_err(|_| "a tensor's name has no end".to_owned())
    }

    /// The tensor's type and shape, if they agree with the size that ggml gives it.
    ///
    /// # Safety
    /// As [`TensorLayout::name`], which must have found the name in its place.
    pub(super) unsafe fn node(&self, tensor: *const ggml_tensor, ggml: &Ggml) -> Result<Node, String> {
        let base = tensor.cast::<u8>();
        // SAFETY: checked to lie inside the tensor.
        let kind = unsafe { base.wrapping_add(self.offset_type).cast::<i32>().read_unaligned() };
        // SAFETY: as above.
        let ne = unsafe { base.wrapping_add(self.offset_ne).cast::<[i64; 4]>().read_unaligned() };
        // SAFETY: as above.
        let nb = unsafe { base.wrapping_add(self.offset_nb).cast::<[usize; 4]>().read_unaligned() };
        let node = Node { kind, ne, nb };
        // SAFETY: the caller passes a tensor of the ggml whose function this is.
        let said = unsafe { (ggml.n_bytes)(tensor) };
        if kind == self.type_i32 && node.n_bytes_i32() != Some(said) {
            return Err(format!(
                "ggml says that a tensor of shape {ne:?} and strides {nb:?} has {said} bytes, which it can not: the \
                 layout is not that of the ggml that runs"
            ));
        }
        Ok(node)
    }
}

impl Node {
    /// Bytes from the first to the last element of a tensor of 4-byte integers; nothing for an impossible shape.
    fn n_bytes_i32(&self) -> Option<usize> {
        self.ne.iter().zip(self.nb).try_fold(4usize, |sum, (&ne, nb)| {
            let more = usize::try_from(ne).ok()?.checked_sub(1)?;
            sum.checked_add(more.checked_mul(nb)?)
        })
    }

    /// Columns of `k` packed ids, if that is what the node is: how many, and the bytes from one to the next.
    pub(super) fn columns(&self, k: usize, type_i32: i32) -> Result<(usize, usize), String> {
        let [_, n, 1, 1] = self.ne else { return Err(self.unexpected(k)) };
        let fits = self.kind == type_i32
            && usize::try_from(self.ne[0]) == Ok(k)
            && self.nb[0] == 4
            && self.nb[1] >= k * 4
            && self.nb[1].is_multiple_of(4);
        match usize::try_from(n) {
            Ok(n) if fits => Ok((n, self.nb[1])),
            _ => Err(self.unexpected(k)),
        }
    }

    fn unexpected(&self, k: usize) -> String {
        format!(
            "the gate's node has type {}, shape {:?} and strides {:?} where {k} packed ids a token were expected",
            self.kind, self.ne, self.nb
        )
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A tensor of the test's own making, with the fields in an order of its own.
    #[repr(C)]
    pub(in crate::capi) struct Fake {
        pub name: [u8; 64],
        pub nb: [usize; 4],
        pub ne: [i64; 4],
        pub kind: i32,
        pub data: Vec<i32>,
    }

    pub(in crate::capi) const TYPE_I32: i32 = 26;

    impl Fake {
        /// `columns` columns of `k` ids, `stride` ids apart.
        pub(in crate::capi) fn new(name: &str, k: usize, stride: usize, data: Vec<i32>) -> Self {
            let n = data.len().div_ceil(stride);
            let mut bytes = [0; 64];
            bytes[..name.len()].copy_from_slice(name.as_bytes());
            let ne = [k, n, 1, 1].map(|n| i64::try_from(n).expect("small"));
            Self { name: bytes, nb: [4, stride * 4, n * stride * 4, n * stride * 4], ne, kind: TYPE_I32, data }
        }

        pub(in crate::capi) fn tensor(&self) -> *const ggml_tensor {
            (&raw const *self).cast()
        }
    }

    pub(in crate::capi) fn layout() -> TensorLayout {
        TensorLayout {
            n_bytes: size_of::<Fake>(),
            offset_type: std::mem::offset_of!(Fake, kind),
            offset_ne: std::mem::offset_of!(Fake, ne),
            offset_nb: std::mem::offset_of!(Fake, nb),
            offset_name: 0,
            n_name: 64,
            type_i32: TYPE_I32,
        }
    }

    pub(in crate::capi) unsafe extern "C" fn get_name(tensor: *const ggml_tensor) -> *const c_char {
        tensor.cast()
    }

    pub(in crate::capi) unsafe extern "C" fn n_bytes(tensor: *const ggml_tensor) -> usize {
        // SAFETY: the tests pass fakes only.
        let fake = unsafe { &*tensor.cast::<Fake>() };
        (0..4).map(|i| (usize::try_from(fake.ne[i]).unwrap_or(0).saturating_sub(1)) * fake.nb[i]).sum::<usize>() + 4
    }

    pub(in crate::capi) unsafe extern "C" fn tensor_get(
        tensor: *const ggml_tensor,
        to: *mut c_void,
        offset: usize,
        size: usize,
    ) {
        // SAFETY: the tests pass fakes only.
        let fake = unsafe { &*tensor.cast::<Fake>() };
        assert!(offset.is_multiple_of(4) && offset + size <= fake.data.len() * 4, "a read outside the tensor");
        let from = fake.data[offset / 4..].as_ptr();
        // SAFETY: inside the data, as just asserted, and `to` has `size` bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), size) };
    }

    pub(in crate::capi) const GGML: Ggml = Ggml { get_name, n_bytes, tensor_get };

    #[test]
    fn a_layout_no_compiler_makes_is_refused() {
        let good = layout();
        assert!(good.check().is_ok());
        let bad = [
            TensorLayout { n_bytes: 100, ..good },
            TensorLayout { n_bytes: 1 << 20, ..good },
            TensorLayout { offset_ne: good.offset_ne + 4, ..good },
            TensorLayout { offset_ne: good.offset_nb, ..good },
            TensorLayout { offset_name: usize::MAX, ..good },
            TensorLayout { n_name: 8, ..good },
            TensorLayout::default(),
        ];
        for layout in bad {
            assert!(layout.check().is_err_and(|failure| failure.status() == Status::Layout), "{layout:?}");
        }
    }

    #[test]
    fn a_layout_of_another_ggml_is_found_out() {
        let fake = Fake::new("ffn_moe_topk-3", 2, 4, vec![0, 1, 2, 3, 4, 5, 6, 7]);
        let right = layout();
        // SAFETY: a fake is alive and the functions are its own.
        let name = unsafe { right.name(fake.tensor(), &GGML) };
        assert_eq!(name, Ok(c"ffn_moe_topk-3"));
        // SAFETY: as above.
        let node = unsafe { right.node(fake.tensor(), &GGML) }.expect("the layout is right");
        assert_eq!(node.columns(2, TYPE_I32), Ok((2, 16)));
        assert!(node.columns(4, TYPE_I32).is_err() && node.columns(2, 0).is_err());
        let moved = TensorLayout { offset_name: 8, ..right };
        // SAFETY: as above.
        let name = unsafe { moved.name(fake.tensor(), &GGML) };
        assert!(name.is_err_and(|why| why.contains("keeps a tensor's name 0 bytes into it")));
        let swapped = TensorLayout { offset_ne: right.offset_nb, offset_nb: right.offset_ne, ..right };
        // SAFETY: as above.
        let node = unsafe { swapped.node(fake.tensor(), &GGML) };
        assert!(node.is_err_and(|why| why.contains("not that of the ggml that runs")));
    }
}
