//! Bytes of tensors between files and memory: in bounded memory, in long reads and writes, checked, digested.
//!
//! A [`job::Job`] says which pieces of which tensors lie where, and which are to go where. [`run::run`] does it: it finds
//! what the pieces share, cuts that in tiles that fit in its buffers, reads every byte that is needed once and writes it
//! once. Merging shards, splitting them, changing how they are cut, reading a box to memory, digesting and comparing are
//! all the same thing.
//!
//! ```
//! use shardwise_io::{job::*, run::{Options, run}};
//! # let folder = tempfile::tempdir().unwrap();
//! // Columns 0..2 and 2..4 of two rows, in two files, become one file of whole rows.
//! let (left, right, whole) = (folder.path().join("0"), folder.path().join("1"), folder.path().join("all"));
//! std::fs::write(&left, b"abAB").unwrap();
//! std::fs::write(&right, b"cdCD").unwrap();
//! let file = |path: &std::path::Path| Source::File(SourceFile { path: path.into(), size: 4, ..Default::default() });
//! let destination = Destination::File { path: whole.clone(), size: 8, there: false, folder: None };
//! let mut job = Job::new(vec![file(&left), file(&right)], vec![destination]).unwrap();
//! // [holder, offset, start…, stop…, strides…]
//! let sources = [0, 0, 0, 0, 2, 2, 2, 1, /* and */ 1, 0, 0, 2, 2, 4, 2, 1];
//! job.add(1, &[2, 4], &sources, &[0, 0, 0, 0, 2, 4, 4, 1], Wanted::default(), &mut || Ok(())).unwrap();
//! run(&job, &Options::default(), &mut |_, _| Ok(())).unwrap();
//! assert_eq!(std::fs::read(&whole).unwrap(), b"abcdABCD");
//! ```
//!
//! | module | answers |
//! |---|---|
//! | [`job`], `piece`, `check` | what is to be done, and whether it can be |
//! | `tiles` | in which units |
//! | `pair`, `strided` | what a unit reads, and where it goes |
//! | `unit`, `slot` | one unit, done |
//! | [`run`] | all of them: threads, progress, what is left after a failure |
//! | [`digest`] | a digest that does not depend on how a tensor is cut |
//! | [`crc32c`] | the checksum of other formats: OCDBT, zarr |
//! | [`commit`] | locks, syncs, renames, room |
//! | [`maps`] | memory that is that of a file |
//! | `file`, `table` | operations on files, and the files of a job |
//! | [`faults`] | operations that fail on demand |

mod blocks;
mod check;
pub mod commit;
pub mod crc32c;
pub mod digest;
pub mod error;
pub mod faults;
mod file;
pub mod job;
pub mod maps;
mod pair;
mod piece;
pub mod run;
mod slot;
mod strided;
mod table;
mod tiles;
mod unit;

pub use slot::crc_before;
pub use unit::Traffic;
