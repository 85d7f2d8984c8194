//! Pickles as inert records: what a file says that it would build, and nothing of it built or called.
//!
//! A pickle is a program for a stack machine that calls whatever it names. Here the machine only notes it down: a global
//! is a pair of texts, a call is a record of a callee and its arguments. A call of `getattr` on a global, which is how
//! pickles before protocol 4 name a nested class, is a global too, with a dotted name; any other use of `getattr` is
//! refused. Nothing is imported, so there is nothing that a file could run; what a record means is for the reader of the
//! format to say.
//!
//! Limits, so that memory and time grow with the length of the input and with nothing else:
//!
//! - every length is checked against what is left of the input before anything of it is read;
//! - a value takes at most some 40 bytes for each byte of the input, an opcode one step;
//! - no dict is hashed: its pairs stay a list, so that keys cannot collide, nor be hashed for ever;
//! - integers have at most [`MAX_INTEGER`] bytes, an input at most [`MAX_BYTES`], names at most [`MAX_NAME`];
//! - what only protocols 0 and 1 write, which are texts with escapes, and what reaches outside of the input (extension
//!   codes, out-of-band buffers) is refused.
//!
//! ```
//! use shardwise_core::pickle::{Pickle, Value};
//! // os.system("true"), as protocol 2 calls it.
//! let pickle = Pickle::new(b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.", &mut || Ok(()))?;
//! let Value::Record(record) = pickle.value(pickle.root()) else { panic!("no record") };
//! let Value::Global(global) = pickle.value(pickle.record(record).callee) else { panic!("no global") };
//! assert_eq!(pickle.global(global), (&b"os"[..], &b"system"[..]));
//! # Ok::<(), shardwise_core::error::Error>(())
//! ```

mod calls;
mod containers;
mod machine;
mod memo;
mod opcode;
mod value;

#[cfg(test)]
mod tests;

use crate::{error::Result, parallel::Poll};

pub use value::{Id, MAX_BYTES, MAX_INTEGER, MAX_NAME, Pickle, Record, Span, Value};

impl<'a> Pickle<'a> {
    /// Reads an input to its end.
    ///
    /// # Errors
    /// [`Error::Pickle`](crate::error::Error::Pickle) naming the byte at which the input stops making sense,
    /// [`Error::TooMany`](crate::error::Error::TooMany) if its values are more than there is memory for; what `poll`
    /// returns, which is called every now and then.
    pub fn new(input: &'a [u8], poll: Poll<'_>) -> Result<Self> {
        machine::run(input, poll)
    }
}
