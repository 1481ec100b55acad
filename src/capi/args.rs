//! Reads and writes what C points to, after the checks that can be made.
//!
//! Never follows a NULL or misaligned pointer, and never keeps one.

use std::{
    ffi::{CStr, c_char},
    mem::MaybeUninit,
    ptr,
};

use super::{Status, failure::Failure};

/// A `repr(C)` struct that grows at its end from version to version. Its first field is `size: usize`.
pub(super) trait Growing: Copy {
    /// Its name in C.
    const NAME: &'static str;
    /// Its size in the first version that had it.
    const FIRST_SIZE: usize;
    /// Holds when the program compiles.
    const HAS_GROWN: () = assert!(Self::FIRST_SIZE <= size_of::<Self>(), "a struct never shrinks");

    /// Every field at its default, `size` included.
    fn defaults() -> Self;
}

/// A struct that C may fill in.
///
/// # Safety
/// `repr(C)`, its first field is `size: usize`, and every bit pattern of every field is a value of it.
pub(super) unsafe trait FromC: Growing {}

fn null(what: &str) -> Failure {
    Failure::new(Status::Null, format!("`{what}` is NULL; pass where it is"))
}

fn check_place<T>(at: *const T, what: &str) -> Result<(), Failure> {
    if at.is_null() {
        return Err(null(what));
    }
    if !at.is_aligned() {
        return Err(Failure::new(Status::Argument, format!("`{what}` is misaligned; pass a pointer to its type")));
    }
    Ok(())
}

fn check_size<T: Growing>(size: usize) -> Result<(), Failure> {
    let () = T::HAS_GROWN;
    let known = size_of::<T>();
    if (T::FIRST_SIZE..=known).contains(&size) {
        return Ok(());
    }
    let name = T::NAME;
    let why = format!(
        "the size of the {name} is {size} and this library's is {known}; fill it with {name}'s defaults first, and \
         compile against this library's eldr.h"
    );
    Err(Failure::new(Status::StructSize, why))
}

/// A copy of the struct at `at`; fields its version did not have are at their defaults.
///
/// # Safety
/// `at` is NULL or points to a `size`, and to as many bytes as it says.
pub(super) unsafe fn read<T: FromC>(at: *const T, what: &str) -> Result<T, Failure> {
    check_place(at, what)?;
    // SAFETY: not NULL, aligned, and `size` is its first field.
    let size = unsafe { at.cast::<usize>().read() };
    check_size::<T>(size)?;
    let mut value = T::defaults();
    // SAFETY: the caller says that `size` bytes are there, and they are no more than `value` has; any bytes make one.
    unsafe { ptr::copy_nonoverlapping(at.cast::<u8>(), (&raw mut value).cast::<u8>(), size) };
    Ok(value)
}

/// Writes as much of `value` as the caller's struct has room for; its `size` stays.
///
/// # Safety
/// As [`read`], and the struct may be written.
pub(super) unsafe fn fill<T: Growing>(at: *mut T, value: &T, what: &str) -> Result<(), Failure> {
    check_place(at.cast_const(), what)?;
    // SAFETY: not NULL, aligned, and `size` is its first field.
    let size = unsafe { at.cast::<usize>().read() };
    check_size::<T>(size)?;
    let from = ptr::from_ref(value).cast::<u8>().wrapping_add(size_of::<usize>());
    let to = at.cast::<u8>().wrapping_add(size_of::<usize>());
    // SAFETY: both have `size` bytes, of which the first field is left out.
    unsafe { ptr::copy_nonoverlapping(from, to, size - size_of::<usize>()) };
    Ok(())
}

/// Writes the defaults into a caller's struct of `size` bytes.
///
/// # Safety
/// `at` is NULL or points to `size` bytes that may be written.
pub(super) unsafe fn write_defaults<T: Growing>(at: *mut T, size: usize, what: &str) -> Result<(), Failure> {
    check_place(at.cast_const(), what)?;
    check_size::<T>(size)?;
    // SAFETY: not NULL, aligned, and at least `FIRST_SIZE` bytes, which begin with `size`.
    unsafe { at.cast::<usize>().write(size) };
    // SAFETY: it has its size now.
    unsafe { fill(at, &T::defaults(), what) }
}

/// Writes an answer.
pub(super) fn put<T>(out: Option<&mut MaybeUninit<T>>, value: T, what: &str) -> Result<(), Failure> {
    out.ok_or_else(|| null(what))?.write(value);
    Ok(())
}

/// Refuses a missing place for an answer before anything is done.
pub(super) fn need<'a, T>(out: Option<&'a mut MaybeUninit<T>>, what: &str) -> Result<&'a mut MaybeUninit<T>, Failure> {
    out.ok_or_else(|| null(what))
}

/// The text at `at`; nothing for NULL.
///
/// # Safety
/// `at` is NULL or a terminated string that stays as it is for `'a`.
pub(super) unsafe fn optional_text<'a>(at: *const c_char, what: &str) -> Result<Option<&'a str>, Failure> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, and the caller says it is terminated.
    let text = unsafe { CStr::from_ptr(at) };
    text.to_str().map(Some).map_err(|_| Failure::new(Status::Utf8, format!("`{what}` is not UTF-8; encode it so")))
}

/// The text at `at`.
///
/// # Safety
/// As [`optional_text`].
pub(super) unsafe fn text<'a>(at: *const c_char, what: &str) -> Result<&'a str, Failure> {
    // SAFETY: passed on.
    unsafe { optional_text(at, what) }?.ok_or_else(|| null(what))
}

/// `n` values at `at`, which may be NULL if there are none.
///
/// # Safety
/// `at` is NULL or points to `n` values that stay as they are for `'a`.
pub(super) unsafe fn values<'a, T>(at: *const T, n: usize, what: &str) -> Result<&'a [T], Failure> {
    if n == 0 {
        return Ok(&[]);
    }
    check_place(at, what)?;
    if n > isize::MAX as usize / size_of::<T>() {
        return Err(Failure::new(Status::Argument, format!("`{what}` can not have {n} values; pass how many it has")));
    }
    // SAFETY: not NULL, aligned, of a possible size, and the caller says they are there.
    Ok(unsafe { std::slice::from_raw_parts(at, n) })
}

/// Copies `values` to a buffer with room for `room` of them; says in `n` how many there are either way.
///
/// # Safety
/// `to` is NULL or has room for `room` values.
pub(super) unsafe fn copy_out<T: Copy>(
    values: &[T],
    to: *mut T,
    room: usize,
    n: Option<&mut MaybeUninit<usize>>,
) -> Result<(), Failure> {
    if let Some(n) = n {
        n.write(values.len());
    }
    if room < values.len() {
        let why = format!("the buffer has room for {room} values and {} are needed; pass a larger one", values.len());
        return Err(Failure::new(Status::Buffer, why));
    }
    if values.is_empty() {
        return Ok(());
    }
    check_place(to.cast_const(), "buffer")?;
    // SAFETY: not NULL, aligned, with room for as many, and a caller's buffer is none of ours.
    unsafe { ptr::copy_nonoverlapping(values.as_ptr(), to, values.len()) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Params {
        size: usize,
        a: u32,
        b: u32,
    }

    // SAFETY: repr(C), numbers only.
    unsafe impl FromC for Params {}

    impl Growing for Params {
        const NAME: &'static str = "eldr_params";
        const FIRST_SIZE: usize = 12;

        fn defaults() -> Self {
            Self { size: size_of::<Self>(), a: 1, b: 2 }
        }
    }

    fn read_it(params: &Params) -> Result<Params, Status> {
        // SAFETY: a whole struct is there.
        unsafe { read(params, "params") }.map_err(|failure| failure.status())
    }

    #[test]
    fn an_older_struct_gets_defaults_for_what_it_lacks() {
        let whole = Params { size: 16, a: 7, b: 8 };
        assert_eq!(read_it(&whole), Ok(whole));
        assert_eq!(read_it(&Params { size: 12, ..whole }), Ok(Params { size: 12, a: 7, b: 2 }));
        for size in [0, 8, 11, 17, usize::MAX] {
            assert_eq!(read_it(&Params { size, ..whole }), Err(Status::StructSize), "{size}");
        }
        // SAFETY: NULL is allowed.
        assert!(unsafe { read::<Params>(ptr::null(), "params") }.is_err_and(|f| f.status() == Status::Null));
    }

    #[test]
    fn an_older_struct_is_filled_no_further_than_it_goes() {
        let mut old = Params { size: 12, a: 0, b: 99 };
        // SAFETY: a whole struct is there.
        unsafe { fill(&raw mut old, &Params { size: 16, a: 5, b: 6 }, "out") }.expect("its size is known");
        assert_eq!(old, Params { size: 12, a: 5, b: 99 });
        // SAFETY: as above.
        unsafe { write_defaults(&raw mut old, 16, "out") }.expect("its size is known");
        assert_eq!(old, Params::defaults());
    }

    #[test]
    fn a_small_buffer_is_told_how_much_is_needed() {
        let mut buffer = [0u8; 4];
        let mut n = MaybeUninit::uninit();
        // SAFETY: there is room for two.
        let copied = unsafe { copy_out(b"abc", buffer.as_mut_ptr(), 2, Some(&mut n)) };
        assert!(copied.is_err_and(|failure| failure.status() == Status::Buffer));
        // SAFETY: written above.
        assert_eq!((unsafe { n.assume_init() }, buffer), (3, [0; 4]));
        // SAFETY: there is room for four.
        unsafe { copy_out(b"abc", buffer.as_mut_ptr(), 4, None) }.expect("room");
        assert_eq!(&buffer, b"abc\0");
        // SAFETY: no values, so NULL is never followed.
        assert!(unsafe { values::<u32>(ptr::null(), 0, "ids") }.is_ok_and(<[u32]>::is_empty));
    }
}
