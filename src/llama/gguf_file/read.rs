//! What is in a GGUF file: metadata by key, the tensor table, and the bytes of one tensor.
//!
//! Never changes the file.

use std::{
    ffi::{CStr, CString, c_char, c_void},
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    ptr::{self, NonNull},
};

use llama_cpp_sys_2 as sys;

use super::{Array, GgufError, TensorType, Value};
use crate::llama::{error::LlamaError, guard, logging};

/// A GGUF file's metadata and tensor table, read whole; tensor data stays on disk until asked for.
#[derive(Debug)]
pub struct GgufFile {
    // Owned; freed in `drop`.
    ctx: NonNull<sys::gguf_context>,
    path: PathBuf,
    n_bytes: u64,
    data_offset: u64,
    tensors: Vec<TensorInfo>,
}

/// One line of the tensor table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, such as `blk.3.ffn_down_exps.weight`.
    pub name: String,
    /// The format of its numbers.
    pub ttype: TensorType,
    /// Numbers along each axis, the contiguous axis first, 1 where there is none (ggml's `ne`).
    pub shape: [u64; 4],
    /// Where its data starts, in bytes from the start of the data section.
    pub offset: u64,
    /// Bytes of its data, padding not included.
    pub n_bytes: u64,
}

impl GgufFile {
    /// Reads the metadata and tensor table of `path`, and checks that the file is long enough for its tensors.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        Ok(Self::read(path.as_ref())?)
    }

    /// As [`GgufFile::open`].
    pub(in crate::llama) fn read(path: &Path) -> Result<Self, LlamaError> {
        let n_bytes = check_file(path)?;
        let name = c_path(path)?;
        let mut raw = ptr::null_mut();
        logging::clear_errors();
        // SAFETY: the path is a C string and the place for the context outlives the call.
        guard::call(|message, size| unsafe { guard::eldr_guard_gguf_open(name.as_ptr(), &raw mut raw, message, size) })
            .map_err(|e| LlamaError::BadHeader { path: path.to_owned(), reason: e.to_string() })?;
        let ctx = NonNull::new(raw)
            .ok_or_else(|| LlamaError::BadHeader { path: path.to_owned(), reason: logging::take_reason() })?;
        // From here `Self` owns `ctx`.
        let mut this = Self { ctx, path: path.to_owned(), n_bytes, data_offset: 0, tensors: Vec::new() };
        // SAFETY: `ctx` is alive.
        this.data_offset = unsafe { sys::gguf_get_data_offset(this.as_ptr()) } as u64;
        // SAFETY: `ctx` is alive.
        let n_tensors = unsafe { sys::gguf_get_n_tensors(this.as_ptr()) };
        this.tensors = (0..n_tensors).map(|id| this.tensor_info(id)).collect();
        let end = |tensor: &TensorInfo| this.data_offset.saturating_add(tensor.offset).saturating_add(tensor.n_bytes);
        let need = this.tensors.iter().map(end).fold(this.data_offset, u64::max);
        if need > n_bytes {
            return Err(LlamaError::Truncated { path: this.path.clone(), need, have: n_bytes });
        }
        Ok(this)
    }

    /// The strings of the array `key` as they are, in UTF-8 or not; none where it is no such array.
    pub(in crate::llama) fn strings(&self, key: &CStr) -> Option<Vec<&[u8]>> {
        // SAFETY: `ctx` is alive and the key a C string.
        let id = unsafe { sys::gguf_find_key(self.as_ptr(), key.as_ptr()) };
        if id < 0 {
            return None;
        }
        // SAFETY: `id` is a key.
        if unsafe { sys::gguf_get_kv_type(self.as_ptr(), id) } != sys::GGUF_TYPE_ARRAY {
            return None;
        }
        // SAFETY: `id` is an array.
        if unsafe { sys::gguf_get_arr_type(self.as_ptr(), id) } != sys::GGUF_TYPE_STRING {
            return None;
        }
        // SAFETY: `id` is an array.
        let n = unsafe { sys::gguf_get_arr_n(self.as_ptr(), id) };
        let string = |i| {
            // SAFETY: `id` is an array of `n` strings.
            let value = unsafe { sys::gguf_get_arr_str(self.as_ptr(), id, i) };
            // SAFETY: a C string that lives as long as `ctx`, which `self` owns.
            unsafe { CStr::from_ptr(value) }.to_bytes()
        };
        Some((0..n).map(string).collect())
    }

    /// The file's name as it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the whole file.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Every tensor, in the order of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|t| t.name == name)
    }

    /// Every metadata key, in the order of the file.
    pub fn keys(&self) -> Vec<String> {
        // SAFETY: `ctx` is alive.
        let n = unsafe { sys::gguf_get_n_kv(self.as_ptr()) };
        (0..n)
            .map(|id| {
                // SAFETY: `id` is below the number of keys.
                let key = unsafe { sys::gguf_get_key(self.as_ptr(), id) };
                // SAFETY: the key lives as long as `ctx`.
                unsafe { text(key) }
            })
            .collect()
    }

    /// The value of `key`.
    pub fn value(&self, key: &str) -> Option<Value> {
        let key = CString::new(key).ok()?;
        // SAFETY: `key` is NUL-terminated.
        let id = unsafe { sys::gguf_find_key(self.as_ptr(), key.as_ptr()) };
        (id >= 0).then(|| self.value_at(id))
    }

    /// The model's architecture (`general.architecture`), which prefixes its keys.
    pub fn architecture(&self) -> Option<String> {
        self.value("general.architecture")?.as_str().map(str::to_owned)
    }

    /// The value of `{architecture}.{key}`.
    pub fn arch_value(&self, key: &str) -> Option<Value> {
        self.value(&format!("{}.{key}", self.architecture()?))
    }

    /// The bytes of `tensor`, which is of this file, to be read once from the start.
    pub fn data(&self, tensor: &TensorInfo) -> Result<impl Read + use<>, GgufError> {
        let mut file = File::open(&self.path).map_err(GgufError::io("open", &self.path))?;
        let start = self.data_offset + tensor.offset;
        file.seek(SeekFrom::Start(start)).map_err(GgufError::io("read", &self.path))?;
        Ok(file.take(tensor.n_bytes))
    }

    pub(super) fn as_ptr(&self) -> *const sys::gguf_context {
        self.ctx.as_ptr()
    }

    fn tensor_info(&self, id: i64) -> TensorInfo {
        // SAFETY: `id` is below the number of tensors (here and in the four calls below).
        let name = unsafe { sys::gguf_get_tensor_name(self.as_ptr(), id) };
        // SAFETY: as above.
        let ne = unsafe { sys::gguf_get_tensor_ne(self.as_ptr(), id) };
        // SAFETY: as above.
        let ttype = unsafe { sys::gguf_get_tensor_type(self.as_ptr(), id) };
        // SAFETY: as above.
        let offset = unsafe { sys::gguf_get_tensor_offset(self.as_ptr(), id) };
        // SAFETY: as above.
        let n_bytes = unsafe { sys::gguf_get_tensor_size(self.as_ptr(), id) };
        // SAFETY: gguf.h: an array of GGML_MAX_DIMS (4) numbers.
        let ne = unsafe { ne.cast::<[i64; 4]>().read() };
        TensorInfo {
            // SAFETY: the name lives as long as `ctx`.
            name: unsafe { text(name) },
            ttype: TensorType(ttype),
            shape: ne.map(i64::unsigned_abs),
            offset: offset as u64,
            n_bytes: n_bytes as u64,
        }
    }

    fn value_at(&self, id: i64) -> Value {
        // Each arm asks for the type the key was found to have, which is what the getters insist on.
        macro_rules! get {
            ($getter:ident) => {
                // SAFETY: `id` is a key of `ctx`, of the type of the arm.
                unsafe { sys::$getter(self.as_ptr(), id) }
            };
        }
        match get!(gguf_get_kv_type) {
            sys::GGUF_TYPE_UINT8 => Value::U8(get!(gguf_get_val_u8)),
            sys::GGUF_TYPE_INT8 => Value::I8(get!(gguf_get_val_i8)),
            sys::GGUF_TYPE_UINT16 => Value::U16(get!(gguf_get_val_u16)),
            sys::GGUF_TYPE_INT16 => Value::I16(get!(gguf_get_val_i16)),
            sys::GGUF_TYPE_UINT32 => Value::U32(get!(gguf_get_val_u32)),
            sys::GGUF_TYPE_INT32 => Value::I32(get!(gguf_get_val_i32)),
            sys::GGUF_TYPE_UINT64 => Value::U64(get!(gguf_get_val_u64)),
            sys::GGUF_TYPE_INT64 => Value::I64(get!(gguf_get_val_i64)),
            sys::GGUF_TYPE_FLOAT32 => Value::F32(get!(gguf_get_val_f32)),
            sys::GGUF_TYPE_FLOAT64 => Value::F64(get!(gguf_get_val_f64)),
            sys::GGUF_TYPE_BOOL => Value::Bool(get!(gguf_get_val_bool)),
            sys::GGUF_TYPE_ARRAY => Value::Array(self.array_at(id, get!(gguf_get_arr_n))),
            _ => {
                let value = get!(gguf_get_val_str);
                // SAFETY: the string lives as long as `ctx`.
                Value::Str(unsafe { text(value) })
            }
        }
    }

    fn array_at(&self, id: i64, n: usize) -> Array {
        macro_rules! copy {
            ($number:ty) => {{
                // SAFETY: `id` is an array of numbers.
                let data = unsafe { sys::gguf_get_arr_data(self.as_ptr(), id) };
                // SAFETY: it has `n` packed numbers of the arm's type.
                unsafe { packed::<$number>(data, n) }
            }};
        }
        // SAFETY: `id` is an array.
        match unsafe { sys::gguf_get_arr_type(self.as_ptr(), id) } {
            sys::GGUF_TYPE_UINT8 => Array::U8(copy!(u8)),
            sys::GGUF_TYPE_INT8 => Array::I8(copy!(i8)),
            sys::GGUF_TYPE_UINT16 => Array::U16(copy!(u16)),
            sys::GGUF_TYPE_INT16 => Array::I16(copy!(i16)),
            sys::GGUF_TYPE_UINT32 => Array::U32(copy!(u32)),
            sys::GGUF_TYPE_INT32 => Array::I32(copy!(i32)),
            sys::GGUF_TYPE_UINT64 => Array::U64(copy!(u64)),
            sys::GGUF_TYPE_INT64 => Array::I64(copy!(i64)),
            sys::GGUF_TYPE_FLOAT32 => Array::F32(copy!(f32)),
            sys::GGUF_TYPE_FLOAT64 => Array::F64(copy!(f64)),
            sys::GGUF_TYPE_BOOL => Array::Bool(copy!(i8).into_iter().map(|b| b != 0).collect()),
            _ => Array::Str(
                (0..n)
                    .map(|i| {
                        // SAFETY: `id` is an array of `n` strings.
                        let value = unsafe { sys::gguf_get_arr_str(self.as_ptr(), id, i) };
                        // SAFETY: the string lives as long as `ctx`.
                        unsafe { text(value) }
                    })
                    .collect(),
            ),
        }
    }
}

impl Drop for GgufFile {
    fn drop(&mut self) {
        // SAFETY: `ctx` is owned by this file and not used after.
        unsafe { sys::gguf_free(self.ctx.as_ptr()) };
    }
}

/// # Safety
/// `chars` is a NUL-terminated string that lives during the call.
unsafe fn text(chars: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(chars) }.to_string_lossy().into_owned()
}

/// # Safety
/// `data` has `n` packed numbers of type `T`, at any alignment; it is not read if `n` is 0.
unsafe fn packed<T: Copy + Default>(data: *const c_void, n: usize) -> Vec<T> {
    let mut numbers = vec![T::default(); n];
    if n > 0 {
        // SAFETY: the caller's promise; `numbers` has room for as many bytes.
        unsafe { ptr::copy_nonoverlapping(data.cast::<u8>(), numbers.as_mut_ptr().cast::<u8>(), n * size_of::<T>()) };
    }
    numbers
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

/// The path of a model as llama.cpp takes it.
pub(in crate::llama) fn c_path(path: &Path) -> Result<CString, LlamaError> {
    let bytes = path.to_str().map(str::as_bytes).ok_or_else(|| LlamaError::Unreadable {
        path: path.to_owned(),
        reason: "llama.cpp takes paths in UTF-8 only".to_owned(),
    })?;
    CString::new(bytes).map_err(|_| LlamaError::Nul { what: "the model's path" })
}
