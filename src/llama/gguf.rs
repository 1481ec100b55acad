//! What a GGUF file's header says: metadata, tensor table, and a digest of both, over all parts of a split model.
//!
//! Never reads a weight, and never lets llama.cpp see a file that is not there, not GGUF, or cut off.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
};

use llama_cpp_sys_2 as sys;
use sha2::{Digest, Sha256};

use super::{
    error::LlamaError,
    facts,
    gguf_file::{Array, GgufFile, Value as Typed},
    plausible,
};

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
        let first = GgufFile::read(path)?;
        let values = values(&first, &mut digest);
        if !matches!(values.get("general.architecture"), Some(Value::Text(arch)) if !arch.is_empty()) {
            return Err(LlamaError::NoArchitecture { path: path.to_owned() });
        }
        let damaged = facts::contradiction(&values).or_else(|| repeated_token(&first, &values));
        if let Some(reason) = damaged {
            return Err(LlamaError::Inconsistent { path: path.to_owned(), reason });
        }
        let mut tensors: Vec<Tensor> = table(&first).collect();
        for part in other_parts(path, &values) {
            tensors.extend(table(&GgufFile::read(&part)?));
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

/// Every value by its key; those that say what the model computes are hashed, in the order of the keys.
fn values(file: &GgufFile, digest: &mut Sha256) -> BTreeMap<String, Value> {
    let mut keys = file.keys();
    keys.sort();
    let mut values = BTreeMap::new();
    for key in keys {
        let Some(value) = file.value(&key) else { continue };
        if is_identity(&key) {
            hash_bytes(digest, key.as_bytes());
            hash_value(digest, &value);
        }
        values.insert(key, Value::from(value));
    }
    values
}

fn table(file: &GgufFile) -> impl Iterator<Item = Tensor> {
    file.tensors().iter().map(|info| Tensor {
        name: info.name.clone(),
        type_: info.ttype.0,
        shape: info.shape.map(u64::cast_signed),
        bytes: info.n_bytes,
    })
}

/// The first token that occurs twice, over which llama.cpp ends the process (llama-vocab.cpp, `load`).
fn repeated_token(file: &GgufFile, values: &BTreeMap<String, Value>) -> Option<String> {
    let key = c"tokenizer.ggml.tokens";
    if matches!(values.get("tokenizer.ggml.model"), Some(Value::Text(t)) if t == "no_vocab" || t == "none") {
        return None;
    }
    let tokens = file.strings(key)?;
    let mut seen = HashMap::with_capacity(tokens.len());
    for (i, token) in tokens.into_iter().enumerate() {
        // The loader names empty tokens so.
        let token = if token.is_empty() { format!("[EMPTY_{i}]").into_bytes().into() } else { Cow::Borrowed(token) };
        if let Some(first) = seen.get(&token) {
            let (token, name) = (token.escape_ascii(), key.to_string_lossy());
            return Some(format!("tokens {first} and {i} of {name} are both \"{token}\""));
        }
        seen.insert(token, i);
    }
    None
}

fn is_identity(key: &str) -> bool {
    key == "general.architecture" || !(key.starts_with("general.") || key.starts_with("split."))
}

/// Hashes a value's type and bytes.
fn hash_value(digest: &mut Sha256, value: &Typed) {
    let mut number = |type_: sys::gguf_type, bytes: &[u8]| {
        digest.update(type_.to_le_bytes());
        hash_bytes(digest, bytes);
    };
    match value {
        Typed::U8(n) => number(sys::GGUF_TYPE_UINT8, &n.to_le_bytes()),
        Typed::I8(n) => number(sys::GGUF_TYPE_INT8, &n.to_le_bytes()),
        Typed::U16(n) => number(sys::GGUF_TYPE_UINT16, &n.to_le_bytes()),
        Typed::I16(n) => number(sys::GGUF_TYPE_INT16, &n.to_le_bytes()),
        Typed::U32(n) => number(sys::GGUF_TYPE_UINT32, &n.to_le_bytes()),
        Typed::I32(n) => number(sys::GGUF_TYPE_INT32, &n.to_le_bytes()),
        Typed::U64(n) => number(sys::GGUF_TYPE_UINT64, &n.to_le_bytes()),
        Typed::I64(n) => number(sys::GGUF_TYPE_INT64, &n.to_le_bytes()),
        Typed::F32(x) => number(sys::GGUF_TYPE_FLOAT32, &x.to_le_bytes()),
        Typed::F64(x) => number(sys::GGUF_TYPE_FLOAT64, &x.to_le_bytes()),
        Typed::Bool(b) => number(sys::GGUF_TYPE_BOOL, &[u8::from(*b)]),
        Typed::Str(text) => number(sys::GGUF_TYPE_STRING, text.as_bytes()),
        Typed::Array(array) => {
            digest.update(sys::GGUF_TYPE_ARRAY.to_le_bytes());
            hash_array(digest, array);
        }
    }
}

fn hash_array(digest: &mut Sha256, array: &Array) {
    macro_rules! bytes {
        ($numbers:expr) => {
            $numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
        };
    }
    let bytes: Vec<u8> = match array {
        Array::Str(texts) => {
            digest.update((texts.len() as u64).to_le_bytes());
            return texts.iter().for_each(|text| hash_bytes(digest, text.as_bytes()));
        }
        Array::U8(numbers) => bytes!(numbers),
        Array::I8(numbers) => bytes!(numbers),
        Array::U16(numbers) => bytes!(numbers),
        Array::I16(numbers) => bytes!(numbers),
        Array::U32(numbers) => bytes!(numbers),
        Array::I32(numbers) => bytes!(numbers),
        Array::U64(numbers) => bytes!(numbers),
        Array::I64(numbers) => bytes!(numbers),
        Array::F32(numbers) => bytes!(numbers),
        Array::F64(numbers) => bytes!(numbers),
        Array::Bool(flags) => flags.iter().map(|&flag| u8::from(flag)).collect(),
    };
    if !bytes.is_empty() {
        hash_bytes(digest, &bytes);
    }
}

impl From<Typed> for Value {
    fn from(value: Typed) -> Self {
        match value {
            Typed::U8(n) => Self::Unsigned(n.into()),
            Typed::U16(n) => Self::Unsigned(n.into()),
            Typed::U32(n) => Self::Unsigned(n.into()),
            Typed::U64(n) => Self::Unsigned(n),
            Typed::I8(n) => Self::Signed(n.into()),
            Typed::I16(n) => Self::Signed(n.into()),
            Typed::I32(n) => Self::Signed(n.into()),
            Typed::I64(n) => Self::Signed(n),
            Typed::F32(x) => Self::Float(x.into()),
            Typed::F64(x) => Self::Float(x),
            Typed::Bool(b) => Self::Bool(b),
            Typed::Str(text) => Self::Text(text),
            Typed::Array(array) => Self::from(array),
        }
    }
}

/// How many integers an array has, and the integers if they are few.
fn few<T: Copy>(numbers: &[T], to: impl Fn(T) -> Option<i64>) -> (usize, Vec<i64>) {
    let kept = if numbers.len() <= LONGEST_KEPT { numbers } else { &[] };
    (numbers.len(), kept.iter().filter_map(|&number| to(number)).collect())
}

impl From<Array> for Value {
    fn from(array: Array) -> Self {
        let (kind, (len, ints)) = match &array {
            Array::U8(numbers) => ("u8", few(numbers, |n| Some(n.into()))),
            Array::I8(numbers) => ("i8", few(numbers, |n| Some(n.into()))),
            Array::U16(numbers) => ("u16", few(numbers, |n| Some(n.into()))),
            Array::I16(numbers) => ("i16", few(numbers, |n| Some(n.into()))),
            Array::U32(numbers) => ("u32", few(numbers, |n| Some(n.into()))),
            Array::I32(numbers) => ("i32", few(numbers, |n| Some(n.into()))),
            Array::U64(numbers) => ("u64", few(numbers, |n| n.try_into().ok())),
            Array::I64(numbers) => ("i64", few(numbers, Some)),
            Array::F32(numbers) => ("f32", (numbers.len(), Vec::new())),
            Array::F64(numbers) => ("f64", (numbers.len(), Vec::new())),
            Array::Bool(flags) => ("bool", (flags.len(), Vec::new())),
            Array::Str(texts) => ("str", (texts.len(), Vec::new())),
        };
        Self::Array { kind: kind.to_owned(), len, ints }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_sign_and_few_of_an_array_are_kept() {
        assert_eq!(Value::from(Typed::I8(-1)), Value::Signed(-1));
        assert_eq!(Value::from(Typed::U8(255)), Value::Unsigned(255));
        assert_eq!(Value::from(Typed::F32(1.5)), Value::Float(1.5));
        let array = |array| Value::from(Typed::Array(array));
        let kept = |kind: &str, len, ints: &[i64]| Value::Array { kind: kind.to_owned(), len, ints: ints.to_vec() };
        assert_eq!(array(Array::I16(vec![-7, 7])), kept("i16", 2, &[-7, 7]));
        assert_eq!(array(Array::U64(vec![u64::MAX, 7])), kept("u64", 2, &[7]));
        assert_eq!(array(Array::U8(vec![1; LONGEST_KEPT + 1])), kept("u8", LONGEST_KEPT + 1, &[]));
        assert_eq!(array(Array::Str(vec!["a".to_owned()])), kept("str", 1, &[]));
    }

    // Calibrations and recordings name models by it: another reader must come to the same.
    #[test]
    fn the_shipped_model_has_the_digest_it_always_had() {
        let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-moe-64x4.gguf"));
        assert_eq!(fingerprint(model).expect("readable"), "DIGEST");
    }

    #[test]
    fn parts_of_a_split_model_follow_the_first() {
        let values = BTreeMap::from([("split.count".to_owned(), Value::Unsigned(3))]);
        let parts = other_parts(Path::new("/m/big-00001-of-00003.gguf"), &values);
        assert_eq!(parts, [Path::new("/m/big-00002-of-00003.gguf"), Path::new("/m/big-00003-of-00003.gguf")]);
        assert!(other_parts(Path::new("/m/big.gguf"), &BTreeMap::new()).is_empty());
    }
}
