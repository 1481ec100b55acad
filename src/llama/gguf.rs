//! What a GGUF file's header says: metadata, tensor table, and a digest of both, over all parts of a split model.
//!
//! Never reads a weight, and never lets llama.cpp see a file that is not there, not GGUF, or cut off.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    ffi::{CStr, CString},
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    ptr::{self, NonNull},
};

use llama_cpp_sys_2 as sys;
use sha2::{Digest, Sha256};

use super::{error::LlamaError, facts, guard, logging, plausible};

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    /// Integers are kept when there are few; other arrays only by kind and length.
    Array {
        kind: String,
        len: usize,
        ints: Vec<i64>,
    },
}

/// A row of the tensor table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tensor {
    pub name: String,
    pub type_: sys::ggml_type,
    pub shape: [i64; 4],
    pub bytes: u64,
}

/// The header of a model, all parts together.
#[derive(Debug, Clone)]
pub(super) struct Header {
    pub values: BTreeMap<String, Value>,
    /// By name.
    pub tensors: Vec<Tensor>,
    /// SHA-256 in hex, see [`Header::read`].
    pub digest: String,
}

const LONGEST_KEPT: usize = 4096;

/// The digest of the model an inflated one was made of, which computes the same.
pub const INFLATED_OF: &str = "eldr.inflate.of";

/// Equal for models that compute the same; see [`crate::llama::ModelFacts::fingerprint`].
pub fn fingerprint(path: &Path) -> Result<String, LlamaError> {
    Ok(Header::read(path)?.digest)
}

impl Header {
    /// Reads and checks the file at `path`, and the other parts of a split model beside it.
    ///
    /// The digest covers the architecture, every metadata key in order with its type and value, and every tensor's
    /// name, type and shape, sorted by name. It leaves out the descriptive `general.*` keys and `split.*`, so a renamed
    /// or merged copy of a model has the same digest. An inflated model has that of its source.
    pub fn read(path: &Path) -> Result<Self, LlamaError> {
        let mut digest = Sha256::new();
        let first = Part::open(path)?;
        let values = first.values(Some(&mut digest));
        if !matches!(values.get("general.architecture"), Some(Value::Text(arch)) if !arch.is_empty()) {
            return Err(LlamaError::NoArchitecture { path: path.to_owned() });
        }
        let damaged = facts::contradiction(&values).or_else(|| first.repeated_token(&values));
        if let Some(reason) = damaged {
            return Err(LlamaError::Inconsistent { path: path.to_owned(), reason });
        }
        let mut tensors = first.tensors()?;
        for part in other_parts(path, &values) {
            tensors.extend(Part::open(&part)?.tensors()?);
        }
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(Value::Text(arch)) = values.get("general.architecture")
            && let Some(reason) = plausible::misheaded(arch, &values, &tensors)
        {
            return Err(LlamaError::Inconsistent { path: path.to_owned(), reason });
        }
        for tensor in &tensors {
            hash_bytes(&mut digest, tensor.name.as_bytes());
            digest.update(tensor.type_.to_le_bytes());
            for n in tensor.shape {
                digest.update(n.to_le_bytes());
            }
        }
        let digest = match values.get(INFLATED_OF) {
            Some(Value::Text(source)) => source.clone(),
            _ => format!("{:x}", digest.finalize()),
        };
        Ok(Self { values, tensors, digest })
    }

    /// A whole number, or the largest of an array of them (some models give one a layer).
    pub fn number(&self, key: &str) -> Option<u64> {
        self.values.get(key)?.number()
    }

    /// A text, empty when the key is absent.
    pub fn text(&self, key: &str) -> &str {
        match self.values.get(key) {
            Some(Value::Text(text)) => text,
            _ => "",
        }
    }
}

impl Value {
    /// A whole number, or the largest of an array of them.
    pub fn number(&self) -> Option<u64> {
        match self {
            Self::Unsigned(n) => Some(*n),
            Self::Signed(n) => u64::try_from(*n).ok(),
            Self::Array { ints, .. } => ints.iter().max().and_then(|&n| u64::try_from(n).ok()),
            _ => None,
        }
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unsigned(n) => write!(f, "{n}"),
            Self::Signed(n) => write!(f, "{n}"),
            Self::Float(x) => write!(f, "{x}"),
            Self::Bool(b) => write!(f, "{b}"),
            Self::Text(text) => f.write_str(text),
            Self::Array { kind, len, .. } => write!(f, "[{kind}; {len}]"),
        }
    }
}

/// Paths of parts 2 to n of a split model whose first part is at `path` (llama.h, `llama_split_path`).
fn other_parts(path: &Path, values: &BTreeMap<String, Value>) -> Vec<PathBuf> {
    let Some(Value::Unsigned(count)) = values.get("split.count") else { return Vec::new() };
    let name = path.to_string_lossy();
    let Some(prefix) = name.strip_suffix(&format!("-{:05}-of-{count:05}.gguf", 1)) else { return Vec::new() };
    (2..=*count).map(|no| PathBuf::from(format!("{prefix}-{no:05}-of-{count:05}.gguf"))).collect()
}

fn hash_bytes(digest: &mut Sha256, bytes: &[u8]) {
    digest.update((bytes.len() as u64).to_le_bytes());
    digest.update(bytes);
}

/// One file, opened by ggml. It owns the `gguf_context`.
struct Part {
    raw: NonNull<sys::gguf_context>,
    path: PathBuf,
    file_bytes: u64,
}

impl Drop for Part {
    fn drop(&mut self) {
        // SAFETY: the context is ours and is not used again.
        unsafe { sys::gguf_free(self.raw.as_ptr()) };
    }
}

impl Part {
    fn open(path: &Path) -> Result<Self, LlamaError> {
        let file_bytes = check_file(path)?;
        let c_path = c_path(path)?;
        let mut raw = ptr::null_mut();
        logging::clear_errors();
        // SAFETY: the path is a C string and the place for the context outlives the call.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_gguf_open(c_path.as_ptr(), &raw mut raw, message, size)
        })
        .map_err(|e| LlamaError::BadHeader { path: path.to_owned(), reason: e.to_string() })?;
        let raw = NonNull::new(raw)
            .ok_or_else(|| LlamaError::BadHeader { path: path.to_owned(), reason: logging::take_reason() })?;
        Ok(Self { raw, path: path.to_owned(), file_bytes })
    }

    fn tensors(&self) -> Result<Vec<Tensor>, LlamaError> {
        let gguf = self.raw.as_ptr();
        // SAFETY: the context is open.
        let n = unsafe { sys::gguf_get_n_tensors(gguf) };
        // SAFETY: the context is open.
        let data = unsafe { sys::gguf_get_data_offset(gguf) } as u64;
        let mut end = data;
        let mut tensors = Vec::with_capacity(usize::try_from(n).unwrap_or(0));
        for id in 0..n {
            // SAFETY: the id is below the number of tensors.
            let name = unsafe { sys::gguf_get_tensor_name(gguf, id) };
            // SAFETY: a C string the context owns.
            let name = unsafe { guard::text(name) };
            // SAFETY: the id is below the number of tensors.
            let type_ = unsafe { sys::gguf_get_tensor_type(gguf, id) };
            // SAFETY: the id is below the number of tensors.
            let bytes = unsafe { sys::gguf_get_tensor_size(gguf, id) } as u64;
            // SAFETY: the id is below the number of tensors.
            let offset = unsafe { sys::gguf_get_tensor_offset(gguf, id) } as u64;
            // SAFETY: the id is below the number of tensors.
            let shape = unsafe { sys::gguf_get_tensor_ne(gguf, id) };
            // SAFETY: ggml keeps GGML_MAX_DIMS = 4 lengths a tensor, in the context.
            let shape = unsafe { shape.cast::<[i64; 4]>().read() };
            end = end.max(data.saturating_add(offset).saturating_add(bytes));
            tensors.push(Tensor { name, type_, shape, bytes });
        }
        if end > self.file_bytes {
            return Err(LlamaError::Truncated { path: self.path.clone(), need: end, have: self.file_bytes });
        }
        Ok(tensors)
    }

    fn values(&self, mut digest: Option<&mut Sha256>) -> BTreeMap<String, Value> {
        let gguf = self.raw.as_ptr();
        // SAFETY: the context is open.
        let n = unsafe { sys::gguf_get_n_kv(gguf) };
        let mut keys: Vec<(String, i64)> = (0..n)
            .map(|id| {
                // SAFETY: the id is below the number of keys.
                let key = unsafe { sys::gguf_get_key(gguf, id) };
                // SAFETY: a C string the context owns.
                (unsafe { guard::text(key) }, id)
            })
            .collect();
        keys.sort();
        let mut values = BTreeMap::new();
        for (key, id) in keys {
            let digest = digest.as_deref_mut().filter(|_| is_identity(&key));
            let value = self.value(&key, id, digest);
            values.insert(key, value);
        }
        values
    }

    /// Reads one value; with `digest`, hashes its key, type and bytes.
    fn value(&self, key: &str, id: i64, mut digest: Option<&mut Sha256>) -> Value {
        let gguf = self.raw.as_ptr();
        // SAFETY: the id is below the number of keys.
        let type_ = unsafe { sys::gguf_get_kv_type(gguf, id) };
        if let Some(digest) = digest.as_deref_mut() {
            hash_bytes(digest, key.as_bytes());
            digest.update(type_.to_le_bytes());
        }
        match type_ {
            sys::GGUF_TYPE_STRING => {
                // SAFETY: the key holds a string.
                let text = unsafe { sys::gguf_get_val_str(gguf, id) };
                // SAFETY: a C string the context owns.
                let text = unsafe { guard::text(text) };
                if let Some(digest) = digest {
                    hash_bytes(digest, text.as_bytes());
                }
                Value::Text(text)
            }
            sys::GGUF_TYPE_ARRAY => self.array(id, digest),
            _ => {
                // SAFETY: the key holds a scalar.
                let data = unsafe { sys::gguf_get_val_data(gguf, id) };
                // SAFETY: ggml keeps a scalar's bytes, as many as its type has, in the context.
                let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), width(type_)) };
                if let Some(digest) = digest {
                    hash_bytes(digest, bytes);
                }
                scalar(type_, bytes)
            }
        }
    }

    /// The first token that occurs twice, over which llama.cpp ends the process (llama-vocab.cpp, `load`).
    fn repeated_token(&self, values: &BTreeMap<String, Value>) -> Option<String> {
        let key = c"tokenizer.ggml.tokens";
        let name = key.to_str().ok()?;
        let Value::Array { kind, len, .. } = values.get(name)? else { return None };
        let unread =
            matches!(values.get("tokenizer.ggml.model"), Some(Value::Text(t)) if t == "no_vocab" || t == "none");
        if kind != "str" || unread {
            return None;
        }
        let gguf = self.raw.as_ptr();
        // SAFETY: the context is open and the key a C string.
        let id = unsafe { sys::gguf_find_key(gguf, key.as_ptr()) };
        let mut seen = HashMap::with_capacity(*len);
        for i in 0..*len {
            // SAFETY: the key holds an array of `len` strings.
            let token = unsafe { sys::gguf_get_arr_str(gguf, id, i) };
            // SAFETY: a C string that lives as long as the context.
            let token = unsafe { CStr::from_ptr(token) }.to_bytes();
            // The loader names empty tokens so.
            let token =
                if token.is_empty() { format!("[EMPTY_{i}]").into_bytes().into() } else { Cow::Borrowed(token) };
            if let Some(first) = seen.get(&token) {
                return Some(format!("tokens {first} and {i} of {name} are both \"{}\"", token.escape_ascii()));
            }
            seen.insert(token, i);
        }
        None
    }

    fn array(&self, id: i64, digest: Option<&mut Sha256>) -> Value {
        let gguf = self.raw.as_ptr();
        // SAFETY: the key holds an array.
        let type_ = unsafe { sys::gguf_get_arr_type(gguf, id) };
        // SAFETY: the key holds an array.
        let len = unsafe { sys::gguf_get_arr_n(gguf, id) };
        // SAFETY: no precondition; null for a type that does not exist.
        let kind = unsafe { sys::gguf_type_name(type_) };
        // SAFETY: ggml read an array of this type, so it has a name, a static C string.
        let kind = unsafe { guard::text(kind) };
        let mut ints = Vec::new();
        if type_ == sys::GGUF_TYPE_STRING {
            if let Some(digest) = digest {
                digest.update((len as u64).to_le_bytes());
                for i in 0..len {
                    // SAFETY: the key holds an array of `len` strings.
                    let text = unsafe { sys::gguf_get_arr_str(gguf, id, i) };
                    // SAFETY: a C string the context owns.
                    hash_bytes(digest, unsafe { guard::text(text) }.as_bytes());
                }
            }
        } else if len > 0 {
            // SAFETY: the key holds an array of scalars.
            let data = unsafe { sys::gguf_get_arr_data(gguf, id) };
            let width = width(type_);
            // SAFETY: ggml keeps the array's `len` values of this width, packed, in the context.
            let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len * width) };
            if let Some(digest) = digest {
                hash_bytes(digest, bytes);
            }
            if len <= LONGEST_KEPT {
                ints = bytes.chunks_exact(width).filter_map(|b| whole(&scalar(type_, b))).collect();
            }
        }
        Value::Array { kind, len, ints }
    }
}

fn is_identity(key: &str) -> bool {
    key == "general.architecture" || !(key.starts_with("general.") || key.starts_with("split."))
}

fn whole(value: &Value) -> Option<i64> {
    match value {
        Value::Unsigned(n) => i64::try_from(*n).ok(),
        Value::Signed(n) => Some(*n),
        _ => None,
    }
}

/// Bytes of a scalar (gguf.h, `gguf_type`).
fn width(type_: sys::gguf_type) -> usize {
    match type_ {
        sys::GGUF_TYPE_UINT8 | sys::GGUF_TYPE_INT8 | sys::GGUF_TYPE_BOOL => 1,
        sys::GGUF_TYPE_UINT16 | sys::GGUF_TYPE_INT16 => 2,
        sys::GGUF_TYPE_UINT32 | sys::GGUF_TYPE_INT32 | sys::GGUF_TYPE_FLOAT32 => 4,
        sys::GGUF_TYPE_UINT64 | sys::GGUF_TYPE_INT64 | sys::GGUF_TYPE_FLOAT64 => 8,
        _ => unreachable!("ggml read a GGUF value of type {type_}"),
    }
}

/// A scalar from its bytes. GGUF is little-endian, and so is every host llama.cpp loads it on.
fn scalar(type_: sys::gguf_type, bytes: &[u8]) -> Value {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let unsigned = u64::from_le_bytes(wide);
    let unused = 64 - 8 * bytes.len() as u32;
    let signed = unsigned.cast_signed() << unused >> unused;
    match type_ {
        sys::GGUF_TYPE_BOOL => Value::Bool(unsigned != 0),
        sys::GGUF_TYPE_FLOAT32 => Value::Float(f64::from(f32::from_bits(unsigned as u32))),
        sys::GGUF_TYPE_FLOAT64 => Value::Float(f64::from_bits(unsigned)),
        sys::GGUF_TYPE_INT8 | sys::GGUF_TYPE_INT16 | sys::GGUF_TYPE_INT32 | sys::GGUF_TYPE_INT64 => {
            Value::Signed(signed)
        }
        _ => Value::Unsigned(unsigned),
    }
}

/// Checks what can be checked without ggml; gives the file's length.
fn check_file(path: &Path) -> Result<u64, LlamaError> {
    let unreadable = |e: io::Error| LlamaError::Unreadable { path: path.to_owned(), reason: e.to_string() };
    let facts = fs::metadata(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => LlamaError::NotFound { path: path.to_owned() },
        _ => unreadable(e),
    })?;
    if !facts.is_file() {
        return Err(LlamaError::NotAFile { path: path.to_owned() });
    }
    let mut magic = Vec::new();
    File::open(path).and_then(|file| file.take(4).read_to_end(&mut magic)).map_err(unreadable)?;
    if magic != b"GGUF" {
        let found = if magic.is_empty() { "nothing".to_owned() } else { format!("\"{}\"", magic.escape_ascii()) };
        return Err(LlamaError::NotGguf { path: path.to_owned(), found });
    }
    Ok(facts.len())
}

pub(super) fn c_path(path: &Path) -> Result<CString, LlamaError> {
    let bytes = path.to_str().map(str::as_bytes).ok_or_else(|| LlamaError::Unreadable {
        path: path.to_owned(),
        reason: "llama.cpp takes paths in UTF-8 only".to_owned(),
    })?;
    CString::new(bytes).map_err(|_| LlamaError::Nul { what: "the model's path" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_keep_their_sign_and_width() {
        assert_eq!(scalar(sys::GGUF_TYPE_INT8, &[0xff]), Value::Signed(-1));
        assert_eq!(scalar(sys::GGUF_TYPE_UINT8, &[0xff]), Value::Unsigned(255));
        assert_eq!(scalar(sys::GGUF_TYPE_INT64, &(-7i64).to_le_bytes()), Value::Signed(-7));
        assert_eq!(scalar(sys::GGUF_TYPE_FLOAT32, &1.5f32.to_le_bytes()), Value::Float(1.5));
        assert_eq!(scalar(sys::GGUF_TYPE_BOOL, &[1]), Value::Bool(true));
    }

    #[test]
    fn parts_of_a_split_model_follow_the_first() {
        let values = BTreeMap::from([("split.count".to_owned(), Value::Unsigned(3))]);
        let parts = other_parts(Path::new("/m/big-00001-of-00003.gguf"), &values);
        assert_eq!(parts, [Path::new("/m/big-00002-of-00003.gguf"), Path::new("/m/big-00003-of-00003.gguf")]);
        assert!(other_parts(Path::new("/m/big.gguf"), &BTreeMap::new()).is_empty());
    }
}
