//! What a metadata value and a tensor's number format are.
//!
//! Never touches a file.

use std::ffi::{CStr, c_void};

use llama_cpp_sys_2 as sys;

/// A metadata value of any GGUF type. Strings that are not UTF-8 are read with replacement characters.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "each variant is the GGUF type of the same name")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Str(String),
    Array(Array),
}

/// A metadata array. GGUF arrays do not nest.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "each variant is the GGUF element type of the same name")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Str(Vec<String>),
}

impl Value {
    /// The value of any integer type, if it is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::U64(v) => Some(v),
            Self::I8(v) => v.try_into().ok(),
            Self::I16(v) => v.try_into().ok(),
            Self::I32(v) => v.try_into().ok(),
            Self::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// The text of a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }
}

impl From<u32> for Value {
    fn from(v: u32) -> Self {
        Self::U32(v)
    }
}

impl From<f32> for Value {
    fn from(v: f32) -> Self {
        Self::F32(v)
    }
}

impl From<bool> for Value {
    fn from(v: bool) -> Self {
        Self::Bool(v)
    }
}

impl From<&str> for Value {
    fn from(v: &str) -> Self {
        Self::Str(v.to_owned())
    }
}

/// A tensor's number format: a ggml type, which stores rows in blocks of [`TensorType::block_len`] numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorType(pub(in crate::llama) sys::ggml_type);

impl TensorType {
    /// 32-bit floats.
    pub const F32: Self = Self(sys::GGML_TYPE_F32);
    /// 16-bit floats.
    pub const F16: Self = Self(sys::GGML_TYPE_F16);
    /// 32 bytes and a scale for 32 numbers.
    pub const Q8_0: Self = Self(sys::GGML_TYPE_Q8_0);

    /// The type of ggml's name `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        (0..sys::GGML_TYPE_COUNT).map(Self).find(|t| t.block_len() > 0 && t.name() == name)
    }

    /// ggml's name of the type, such as `q8_0`.
    pub fn name(self) -> String {
        // SAFETY: `self.0` is a type ggml knows: a constant above or an id that `gguf_init_*` accepted.
        let name = unsafe { sys::ggml_type_name(self.0) };
        // SAFETY: ggml's type names are static strings.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// Numbers a block holds; rows are whole blocks.
    pub fn block_len(self) -> u64 {
        // SAFETY: `self.0` is a type ggml knows.
        unsafe { sys::ggml_blck_size(self.0) }.unsigned_abs()
    }

    /// Bytes a row of `n` numbers takes. `n` is a multiple of [`TensorType::block_len`].
    pub fn row_bytes(self, n: u64) -> u64 {
        assert!(n.is_multiple_of(self.block_len()), "a row of {n} is not whole blocks of {}", self.name());
        // SAFETY: `self.0` is a type ggml knows.
        let block = unsafe { sys::ggml_type_size(self.0) };
        n / self.block_len() * block as u64
    }

    /// Whether bytes that are all zero decode to numbers that are all zero; asked of ggml, not of a list.
    pub fn zero_bytes_are_zeros(self) -> bool {
        if self == Self::F32 {
            return true;
        }
        let n = self.block_len() as usize;
        // Blocks hold 16- and 32-bit fields, so the bytes must be aligned.
        let bytes = vec![0u64; (self.row_bytes(n as u64) as usize).div_ceil(8)];
        let mut numbers = vec![f32::NAN; n];
        // SAFETY: `self.0` is a type ggml knows.
        let traits = unsafe { sys::ggml_get_type_traits(self.0) };
        // SAFETY: the table has an entry for each type and lives for ever.
        let traits = unsafe { &*traits };
        let Some(to_float) = traits.to_float else { return false };
        // SAFETY: `bytes` holds a whole block, `numbers` has room for what it decodes to.
        unsafe { to_float(bytes.as_ptr().cast::<c_void>(), numbers.as_mut_ptr(), n.cast_signed() as i64) };
        numbers.iter().all(|&v| v == 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_ggml_sizes() {
        assert_eq!((TensorType::F32.name().as_str(), TensorType::F32.row_bytes(5)), ("f32", 20));
        assert_eq!(TensorType::from_name("q8_0"), Some(TensorType::Q8_0));
        assert_eq!(TensorType::from_name("q8"), None);
        assert_eq!((TensorType::Q8_0.block_len(), TensorType::Q8_0.row_bytes(64)), (32, 68));
    }

    #[test]
    fn a_zero_block_decodes_to_zeros_only_where_ggml_can_decode() {
        let zeros: Vec<String> = (0..sys::GGML_TYPE_COUNT)
            .map(TensorType)
            .filter(|t| t.block_len() > 0 && t.zero_bytes_are_zeros())
            .map(TensorType::name)
            .collect();
        for name in
            ["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"]
        {
            assert!(zeros.iter().any(|z| z == name), "{name} is not among {zeros:?}");
        }
        for name in ["mxfp4", "iq4_nl", "iq4_xs", "iq1_m", "iq2_xxs", "iq3_s", "tq2_0"] {
            assert!(zeros.iter().any(|z| z == name), "{name} is not among {zeros:?}");
        }
        // Integers and activation formats have no decoder, so they are never weights of an expert.
        assert!(!zeros.iter().any(|z| z == "i32" || z == "q8_1"), "{zeros:?}");
    }
}
