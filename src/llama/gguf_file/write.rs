//! How a GGUF file is written: metadata and tensor table first, then the data of one tensor after another.
//!
//! Never leaves a half-written file under the final name.

use std::{
    ffi::CString,
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    ptr::{self, NonNull},
};

use llama_cpp_sys_2 as sys;

use super::{
    Array, GgufError, GgufFile, TensorType, Value,
    partial::{self, Partial},
};

/// ggml's `GGML_MAX_NAME`, the terminating NUL included.
const MAX_NAME: usize = 64;
/// Written files align tensors to `GGUF_DEFAULT_ALIGNMENT` (gguf.h).
const ALIGNMENT: u64 = 32;
const ALIGNMENT_KEY: &str = "general.alignment";

/// The metadata and tensor table of a GGUF file to be.
#[derive(Debug)]
pub struct GgufWriter {
    // Owned; freed in `drop`.
    ctx: NonNull<sys::gguf_context>,
    tensors: Vec<(String, u64)>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self::new()
    }
}

impl GgufWriter {
    /// No metadata and no tensors.
    pub fn new() -> Self {
        // SAFETY: no arguments.
        let ctx = unsafe { sys::gguf_init_empty() };
        Self { ctx: NonNull::new(ctx).expect("gguf_init_empty never fails"), tensors: Vec::new() }
    }

    /// Sets every key of `file` to its value there, all but the alignment, which is the writer's.
    pub fn copy_metadata(&mut self, file: &GgufFile) {
        // SAFETY: both contexts are alive and are not the same.
        unsafe { sys::gguf_set_kv(self.ctx.as_ptr(), file.as_ptr()) };
        // gguf_set_kv copies the key without following it in the offsets of tensors.
        self.remove(ALIGNMENT_KEY);
    }

    /// Removes `key`; nothing happens if it is not set.
    pub fn remove(&mut self, key: &str) {
        if let Ok(key) = CString::new(key) {
            // SAFETY: `key` is NUL-terminated.
            unsafe { sys::gguf_remove_key(self.ctx.as_ptr(), key.as_ptr()) };
        }
    }

    /// Sets `key`, in place of an earlier value. Errors: an empty key, a NUL in key or text, or the alignment.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> Result<(), GgufError> {
        if key == ALIGNMENT_KEY || key.is_empty() {
            return Err(GgufError::Unwritable(format!("the key \"{key}\": it is empty or reserved")));
        }
        let key = c_text(key)?;
        macro_rules! set {
            ($setter:ident, $value:expr) => {
                // SAFETY: `key` and any text are NUL-terminated and copied.
                unsafe { sys::$setter(self.ctx.as_ptr(), key.as_ptr(), $value) }
            };
        }
        match value.into() {
            Value::U8(v) => set!(gguf_set_val_u8, v),
            Value::I8(v) => set!(gguf_set_val_i8, v),
            Value::U16(v) => set!(gguf_set_val_u16, v),
            Value::I16(v) => set!(gguf_set_val_i16, v),
            Value::U32(v) => set!(gguf_set_val_u32, v),
            Value::I32(v) => set!(gguf_set_val_i32, v),
            Value::U64(v) => set!(gguf_set_val_u64, v),
            Value::I64(v) => set!(gguf_set_val_i64, v),
            Value::F32(v) => set!(gguf_set_val_f32, v),
            Value::F64(v) => set!(gguf_set_val_f64, v),
            Value::Bool(v) => set!(gguf_set_val_bool, v),
            Value::Str(v) => set!(gguf_set_val_str, c_text(&v)?.as_ptr()),
            Value::Array(array) => self.set_array(&key, &array)?,
        }
        Ok(())
    }

    fn set_array(&mut self, key: &CString, array: &Array) -> Result<(), GgufError> {
        macro_rules! set {
            ($gguf_type:ident, $values:expr) => {
                // SAFETY: `key` is NUL-terminated; the values are packed, of the named type, and copied.
                unsafe {
                    sys::gguf_set_arr_data(
                        self.ctx.as_ptr(),
                        key.as_ptr(),
                        sys::$gguf_type,
                        $values.as_ptr().cast(),
                        $values.len(),
                    );
                }
            };
        }
        match array {
            Array::U8(v) => set!(GGUF_TYPE_UINT8, v),
            Array::I8(v) => set!(GGUF_TYPE_INT8, v),
            Array::U16(v) => set!(GGUF_TYPE_UINT16, v),
            Array::I16(v) => set!(GGUF_TYPE_INT16, v),
            Array::U32(v) => set!(GGUF_TYPE_UINT32, v),
            Array::I32(v) => set!(GGUF_TYPE_INT32, v),
            Array::U64(v) => set!(GGUF_TYPE_UINT64, v),
            Array::I64(v) => set!(GGUF_TYPE_INT64, v),
            Array::F32(v) => set!(GGUF_TYPE_FLOAT32, v),
            Array::F64(v) => set!(GGUF_TYPE_FLOAT64, v),
            Array::Bool(v) => {
                let bytes: Vec<i8> = v.iter().map(|&b| b.into()).collect();
                set!(GGUF_TYPE_BOOL, bytes);
            }
            Array::Str(v) => {
                let texts = v.iter().map(|s| c_text(s)).collect::<Result<Vec<_>, _>>()?;
                let mut texts: Vec<_> = texts.iter().map(|s| s.as_ptr()).collect();
                // SAFETY: `key` and each text are NUL-terminated and copied; `texts` has `len` pointers.
                unsafe {
                    sys::gguf_set_arr_str(self.ctx.as_ptr(), key.as_ptr(), texts.as_mut_ptr(), texts.len());
                }
            }
        }
        Ok(())
    }

    /// Adds a tensor after the others; `shape` has one to four axes, the contiguous one first.
    ///
    /// Errors: a name that is taken or of more than 63 bytes, a row that is not whole blocks, or no numbers at all.
    pub fn add_tensor(&mut self, name: &str, ttype: TensorType, shape: &[u64]) -> Result<(), GgufError> {
        let bad = |why: &str| Err(GgufError::Unwritable(format!("the tensor \"{name}\" of shape {shape:?}: {why}")));
        let Ok(axes) = shape.iter().map(|&n| i64::try_from(n)).collect::<Result<Vec<_>, _>>() else {
            return bad("too large");
        };
        let Some(n_numbers) = shape.iter().try_fold(1u64, |n, &axis| n.checked_mul(axis)) else {
            return bad("too large");
        };
        let c_name = c_text(name)?;
        // SAFETY: `c_name` is NUL-terminated.
        let id = unsafe { sys::gguf_find_tensor(self.ctx.as_ptr(), c_name.as_ptr()) };
        if id >= 0 {
            return bad("the name is taken");
        }
        if name.is_empty() || name.len() >= MAX_NAME {
            return bad("the name must have 1 to 63 bytes");
        }
        if shape.is_empty() || shape.len() > 4 || n_numbers == 0 {
            return bad("it must have one to four axes, none of them 0");
        }
        if !shape[0].is_multiple_of(ttype.block_len()) {
            return bad("its rows are not whole blocks of its type");
        }
        // SAFETY: no arguments.
        let overhead = unsafe { sys::ggml_tensor_overhead() };
        let params = sys::ggml_init_params { mem_size: overhead, mem_buffer: ptr::null_mut(), no_alloc: true };
        // SAFETY: ggml allocates its own buffer.
        let scratch = unsafe { sys::ggml_init(params) };
        assert!(!scratch.is_null(), "ggml_init failed for {overhead} bytes");
        let n_axes = i32::try_from(axes.len()).expect("at most four");
        // SAFETY: `scratch` has room for one tensor; one to four axes.
        let tensor = unsafe { sys::ggml_new_tensor(scratch, ttype.0, n_axes, axes.as_ptr()) };
        // SAFETY: `tensor` is alive and the name fits.
        unsafe { sys::ggml_set_name(tensor, c_name.as_ptr()) };
        // SAFETY: gguf_add_tensor copies the description; the name is not taken.
        unsafe { sys::gguf_add_tensor(self.ctx.as_ptr(), tensor) };
        // SAFETY: `scratch` is owned here; nothing points into it any more.
        unsafe { sys::ggml_free(scratch) };
        self.tensors.push((name.to_owned(), ttype.row_bytes(shape[0]) * (n_numbers / shape[0])));
        Ok(())
    }

    /// Bytes the file will have.
    pub fn n_bytes(&self) -> u64 {
        self.meta_bytes() as u64 + self.tensors.iter().map(|(_, n)| padded(*n)).sum::<u64>()
    }

    /// Writes `path`, asking `data` to put the bytes of each tensor by name, in the order they were added.
    ///
    /// The file is written under a name of its own beside `path` and renamed when it is complete and on disk, so `path`
    /// holds either what it held before or all of the new file. Returns its size. `data` must put exactly the bytes
    /// of its tensor.
    pub fn write(
        &self,
        path: impl AsRef<Path>,
        data: impl FnMut(&str, &mut Sink) -> Result<(), GgufError>,
    ) -> Result<u64, GgufError> {
        let path = path.as_ref();
        let (partial, n_bytes) = self.write_partial(path, data)?;
        partial.replace(path)?;
        Ok(n_bytes)
    }

    /// As [`Self::write`], but a file that is at `path` when the new one is complete stays there: [`GgufError::Exists`].
    pub fn write_new(
        &self,
        path: impl AsRef<Path>,
        data: impl FnMut(&str, &mut Sink) -> Result<(), GgufError>,
    ) -> Result<u64, GgufError> {
        let path = path.as_ref();
        let (partial, n_bytes) = self.write_partial(path, data)?;
        partial.publish(path)?;
        Ok(n_bytes)
    }

    fn write_partial(
        &self,
        path: &Path,
        mut data: impl FnMut(&str, &mut Sink) -> Result<(), GgufError>,
    ) -> Result<(Partial, u64), GgufError> {
        let partial = Partial::create(path)?;
        let file = partial.handle().map_err(GgufError::io("write", path))?;
        let mut sink = Sink { out: BufWriter::with_capacity(1 << 20, file), n_bytes: 0, path };
        sink.put(&self.meta())?;
        for (name, n_bytes) in &self.tensors {
            let start = sink.n_bytes;
            data(name, &mut sink)?;
            let put = sink.n_bytes - start;
            assert_eq!(put, *n_bytes, "the data of {name} has another size than its table entry");
            sink.put_zeros(padded(*n_bytes) - n_bytes)?;
        }
        Ok((partial, sink.finish()?))
    }

    /// Where [`Self::write`] puts the file until it is complete.
    pub fn partial(path: &Path) -> Result<PathBuf, GgufError> {
        partial::path_of(path)
    }

    /// Removes what writers of `path` left that ended, by whatever means, before it was complete. Those that still
    /// write are not disturbed.
    pub fn sweep(path: &Path) {
        partial::sweep(path);
    }

    fn meta_bytes(&self) -> usize {
        // SAFETY: `ctx` is alive.
        unsafe { sys::gguf_get_meta_size(self.ctx.as_ptr()) }
    }

    fn meta(&self) -> Vec<u8> {
        let mut bytes = vec![0u8; self.meta_bytes()];
        // SAFETY: `bytes` has the size gguf asked for.
        unsafe { sys::gguf_get_meta_data(self.ctx.as_ptr(), bytes.as_mut_ptr().cast()) };
        bytes
    }
}

impl Drop for GgufWriter {
    fn drop(&mut self) {
        // SAFETY: `ctx` is owned by this writer and not used after.
        unsafe { sys::gguf_free(self.ctx.as_ptr()) };
    }
}

fn c_text(text: &str) -> Result<CString, GgufError> {
    CString::new(text).map_err(|_| GgufError::Unwritable(format!("a NUL in the text {text:?}")))
}

fn padded(n_bytes: u64) -> u64 {
    n_bytes.next_multiple_of(ALIGNMENT)
}

/// Takes the data of a file's tensors, one after another.
#[derive(Debug)]
pub struct Sink<'a> {
    out: BufWriter<File>,
    n_bytes: u64,
    path: &'a Path,
}

impl Sink<'_> {
    /// Appends `bytes` to the tensor's data.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), GgufError> {
        self.out.write_all(bytes).map_err(GgufError::io("write", self.path))?;
        self.n_bytes += bytes.len() as u64;
        Ok(())
    }

    /// Appends `n` zero bytes to the tensor's data.
    pub fn put_zeros(&mut self, n: u64) -> Result<(), GgufError> {
        let zeros = [0; 4096];
        let mut left = n;
        while left > 0 {
            let n = left.min(zeros.len() as u64);
            self.put(&zeros[..n as usize])?;
            left -= n;
        }
        Ok(())
    }

    fn finish(self) -> Result<u64, GgufError> {
        let io = || GgufError::io("write", self.path);
        let file = self.out.into_inner().map_err(|e| io()(e.into_error()))?;
        file.sync_all().map_err(io())?;
        Ok(self.n_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io};

    use super::*;

    fn every_type() -> Vec<(&'static str, Value)> {
        vec![
            ("u8", Value::U8(250)),
            ("i8", Value::I8(-7)),
            ("u16", Value::U16(65_000)),
            ("i16", Value::I16(-300)),
            ("u32", Value::U32(4_000_000_000)),
            ("i32", Value::I32(-70_000)),
            ("u64", Value::U64(u64::MAX)),
            ("i64", Value::I64(i64::MIN)),
            ("f32", Value::F32(0.1)),
            ("f64", Value::F64(-1e300)),
            ("bool", Value::Bool(true)),
            ("str", "text".into()),
            ("no bytes", Value::Array(Array::U8(vec![]))),
            ("bytes", Value::Array(Array::I8(vec![-1, 2]))),
            ("shorts", Value::Array(Array::U16(vec![1, 65_535]))),
            ("signed shorts", Value::Array(Array::I16(vec![-1]))),
            ("ids", Value::Array(Array::U32(vec![1, 2, 3]))),
            ("kinds", Value::Array(Array::I32(vec![-1, 3]))),
            ("long", Value::Array(Array::U64(vec![1 << 40]))),
            ("signed long", Value::Array(Array::I64(vec![-(1 << 40)]))),
            ("scores", Value::Array(Array::F32(vec![0.5, -0.25]))),
            ("doubles", Value::Array(Array::F64(vec![1e-9]))),
            ("flags", Value::Array(Array::Bool(vec![true, false, true]))),
            ("words", Value::Array(Array::Str(vec!["a".into(), String::new()]))),
            ("no words", Value::Array(Array::Str(vec![]))),
        ]
    }

    fn sample() -> GgufWriter {
        let mut writer = GgufWriter::new();
        for (key, value) in every_type() {
            writer.set(key, value).expect("writable");
        }
        writer.add_tensor("a", TensorType::F32, &[5, 2]).expect("writable");
        writer.add_tensor("b", TensorType::Q8_0, &[32]).expect("writable");
        writer
    }

    fn put_sample(name: &str, sink: &mut Sink) -> Result<(), GgufError> {
        match name {
            "a" => sink.put(&(0..40).collect::<Vec<u8>>()),
            _ => sink.put_zeros(34),
        }
    }

    #[test]
    fn what_was_written_is_read_back() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("sample.gguf");
        let writer = sample();
        let n_bytes = writer.write(&path, put_sample).expect("written");
        assert_eq!((n_bytes, n_bytes), (writer.n_bytes(), fs::metadata(&path).expect("there").len()));

        let file = GgufFile::open(&path).expect("readable");
        for (key, value) in every_type() {
            assert_eq!(file.value(key), Some(value), "{key}");
        }
        assert_eq!(file.keys(), every_type().iter().map(|(key, _)| *key).collect::<Vec<_>>());
        let a = file.tensor("a").expect("there");
        assert_eq!((a.ttype, a.shape, a.n_bytes), (TensorType::F32, [5, 2, 1, 1], 40));
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut file.data(a).expect("readable"), &mut bytes).expect("readable");
        assert_eq!(bytes, (0..40).collect::<Vec<u8>>());
        assert_eq!(file.tensor("b").expect("there").offset, 64);

        let mut copy = GgufWriter::new();
        copy.copy_metadata(&file);
        copy.set("u32", 1).expect("writable");
        copy.remove("words");
        copy.write(dir.path().join("copy.gguf"), |_, _| Ok(())).expect("written");
        let copy = GgufFile::open(dir.path().join("copy.gguf")).expect("readable");
        assert_eq!((copy.value("u32"), copy.value("words")), (Some(Value::U32(1)), None));
        assert_eq!(copy.keys().len(), every_type().len() - 1);
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("model.gguf");
        fs::write(&path, "old").expect("written");
        let failed = sample().write(&path, |name, sink| match name {
            "a" => put_sample(name, sink),
            _ => Err(GgufError::Unwritable("a fault".into())),
        });
        assert_eq!(failed.expect_err("the fault").to_string(), "cannot write a GGUF file with a fault");
        assert_eq!(fs::read(&path).expect("there"), b"old");
        assert_eq!(fs::read_dir(dir.path()).expect("there").count(), 1);
    }

    #[test]
    fn what_the_format_cannot_hold_is_refused() {
        let mut writer = sample();
        let mut refused = |name: &str, ttype, shape: &[u64]| {
            writer.add_tensor(name, ttype, shape).expect_err("not writable").to_string()
        };
        assert!(refused("a", TensorType::F32, &[1]).ends_with("the name is taken"));
        assert!(refused("c", TensorType::Q8_0, &[33]).ends_with("whole blocks of its type"));
        assert!(refused("c", TensorType::F32, &[]).ends_with("none of them 0"));
        assert!(refused("c", TensorType::F32, &[4, 0]).ends_with("none of them 0"));
        assert!(refused("c", TensorType::F32, &[u64::MAX, 2]).ends_with("too large"));
        assert!(refused(&"c".repeat(64), TensorType::F32, &[1]).ends_with("63 bytes"));
        assert!(writer.set("general.alignment", 64).is_err());
        assert!(writer.set("key", "a\0b").is_err());
    }

    #[test]
    fn damaged_files_are_named_with_what_is_wrong() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("model.gguf");
        sample().write(&path, put_sample).expect("written");
        let whole = fs::read(&path).expect("there");
        let error = |bytes: &[u8]| {
            fs::write(&path, bytes).expect("written");
            GgufFile::open(&path).expect_err("damaged").to_string()
        };
        assert!(error(b"").ends_with("it begins with nothing instead of \"GGUF\""));
        assert!(error(b"PK is another format").ends_with("it begins with \"PK i\" instead of \"GGUF\""));
        let cut = error(&whole[..200]);
        assert!(cut.starts_with("the GGUF header of") && cut.contains("cut off or damaged"), "{cut}");
        let short = error(&whole[..whole.len() - 64]);
        assert!(
            short.contains("is truncated: its tensors end at byte") && short.ends_with("fetch it again"),
            "{short}"
        );
        let missing = GgufFile::open(dir.path().join("none.gguf")).expect_err("missing").to_string();
        assert!(missing.starts_with("no model file at") && missing.contains("none.gguf"), "{missing}");
        assert!(GgufFile::open(dir.path()).expect_err("a folder").to_string().contains("is not a file"));
    }
}
