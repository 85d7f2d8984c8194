//! The index of PyTorch's distributed checkpoints, from its pickle into columns.
//!
//! An index of 10^5 chunks is a pickle of 15 MB and two million values, most of them the words around a few numbers for
//! each chunk. Here they become arrays of numbers.

use std::collections::HashMap;

use crate::{
    error::{Error, Result},
    parallel::Poll,
    pickle::{Id, Pickle, Value},
    region::sides,
    room::Room as _,
    shown::counted,
    tiling::boxes::one_each,
};

/// A tensor of an index.
#[derive(Debug)]
pub struct Tensor<'a> {
    /// The tensor's name.
    pub name: &'a str,
    /// Module and name of the global that is its dtype.
    pub dtype: (&'a str, &'a str),
    /// The tensor's shape.
    pub shape: Vec<i64>,
    /// The number of its first chunk.
    pub first: usize,
    /// The number of its chunks.
    pub chunks: usize,
    /// The position of the numbers of its first chunk in [`Index::bounds`].
    pub bounds: usize,
    /// True if its chunks tile it, each element once; else it has to be looked at more closely.
    pub is_tiled: bool,
}

/// A range of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The number of the file in [`Index::files`].
    pub file: i64,
    /// The first byte of the range.
    pub offset: i64,
    /// The number of bytes.
    pub length: i64,
}

/// An index in columns.
#[derive(Debug, Default)]
pub struct Index<'a> {
    /// The tensors, in the order of the index.
    pub tensors: Vec<Tensor<'a>>,
    /// The values that are not tensors, with the number of their place.
    pub objects: Vec<(&'a str, usize)>,
    /// Start and stop of each dim, for each chunk of each tensor.
    pub bounds: Vec<i64>,
    /// The number of the place of each chunk, or -1 for a chunk without elements that has none.
    pub chunk_places: Vec<i64>,
    /// All ranges.
    pub places: Vec<Place>,
    /// The files, by their paths from the folder of the index.
    pub files: Vec<&'a str>,
}

/// The key of a range: the name of what lies in it, and where it begins; nothing for an object.
type Key<'a> = (&'a [u8], Option<Vec<i64>>);

struct Reader<'a> {
    pickle: &'a Pickle<'a>,
    found: HashMap<Key<'a>, usize>,
    index: Index<'a>,
}

fn wrong(problem: impl Into<String>) -> Error {
    Error::PickledIndex { problem: problem.into() }
}

/// A name from a file for a message.
fn shown(name: &str) -> String {
    let short: String = name.chars().take(100).collect();
    format!("{short:?}{}", if short.len() < name.len() { "…" } else { "" })
}

impl<'a> Index<'a> {
    /// Takes an index from its pickle, which is a `Metadata`.
    ///
    /// # Errors
    /// [`Error::PickledIndex`] if it is not one, [`Error::TooMany`] if there is no memory for it; what `poll` returns.
    pub fn new(pickle: &'a Pickle<'a>, poll: Poll<'_>) -> Result<Self> {
        let mut reader = Reader { pickle, found: HashMap::new(), index: Self::default() };
        let state = reader
            .state(pickle.root(), &[b"Metadata"])
            .ok_or_else(|| wrong("not the Metadata of a distributed checkpoint"))?;
        let storage = reader.attribute(state, b"storage_data");
        let storage = storage.and_then(|id| reader.dict(id)).ok_or_else(|| wrong("storage_data is not a dict"))?;
        let entries = reader.attribute(state, b"state_dict_metadata");
        let entries =
            entries.and_then(|id| reader.dict(id)).ok_or_else(|| wrong("state_dict_metadata is not a dict"))?;
        reader.places(storage, poll)?;
        for (number, &(name, entry)) in entries.iter().enumerate() {
            if number.is_multiple_of(1024) {
                poll()?;
            }
            reader.entry(name, entry, poll)?;
        }
        Ok(reader.index)
    }
}

const CHUNKS: &str = "the chunks of an index";

fn push<T>(vec: &mut Vec<T>, item: T) -> Result<()> {
    vec.room(1, CHUNKS)?;
    vec.push(item);
    Ok(())
}

impl<'a> Reader<'a> {
    /// The pairs of a dict.
    fn dict(&self, id: Id) -> Option<&'a [(Id, Id)]> {
        match self.pickle.value(id) {
            Value::Dict(number) => Some(self.pickle.dict(number)),
            _ => None,
        }
    }

    /// The attributes of an object of one of these classes, known by their last names.
    fn state(&self, id: Id, classes: &[&[u8]]) -> Option<&'a [(Id, Id)]> {
        let Value::Record(number) = self.pickle.value(id) else { return None };
        let record = self.pickle.record(number);
        let Value::Global(class) = self.pickle.value(record.callee) else { return None };
        if !classes.contains(&self.pickle.global(class).1) {
            return None;
        }
        record.state.map_or(Some(&[]), |state| self.dict(state))
    }

    fn attribute(&self, state: &[(Id, Id)], name: &[u8]) -> Option<Id> {
        // The last one counts, as in a dict.
        let is_it = |&&(key, _): &&(Id, Id)| matches!(self.pickle.value(key), Value::Text(span) if self.pickle.bytes(span) == name);
        state.iter().rev().find(is_it).map(|&(_, value)| value)
    }

    fn text(&self, id: Option<Id>) -> Option<&'a str> {
        match self.pickle.value(id?) {
            Value::Text(span) => str::from_utf8(self.pickle.bytes(span)).ok(),
            _ => None,
        }
    }

    fn number(&self, id: Option<Id>) -> Option<i64> {
        match self.pickle.value(id?) {
            Value::Int(number) if number >= 0 => Some(number),
            _ => None,
        }
    }

    /// A `torch.Size`, a tuple or a list of sizes.
    fn sizes(&self, id: Option<Id>) -> Option<Vec<i64>> {
        let mut value = self.pickle.value(id?);
        if let Value::Record(number) = value {
            let record = self.pickle.record(number);
            let Value::Global(class) = self.pickle.value(record.callee) else { return None };
            let Value::Tuple(arguments) = self.pickle.value(record.arguments) else { return None };
            let &[only] = self.pickle.tuple(arguments) else { return None };
            if self.pickle.global(class) != (b"torch", b"Size") {
                return None;
            }
            value = self.pickle.value(only);
        }
        let items = match value {
            Value::Tuple(span) => self.pickle.tuple(span),
            Value::List(number) => self.pickle.list(number),
            _ => return None,
        };
        items.iter().map(|&item| self.number(Some(item))).collect()
    }

    /// The ranges, by what lies in them.
    fn places(&mut self, storage: &[(Id, Id)], poll: Poll<'_>) -> Result<()> {
        let not_one = || wrong("storage_data holds an entry that is not a chunk and its place");
        let mut files: HashMap<&'a str, i64> = HashMap::new();
        self.found.room(storage.len(), CHUNKS)?;
        for (number, &(key, info)) in storage.iter().enumerate() {
            if number.is_multiple_of(1024) {
                poll()?;
            }
            let key = self.state(key, &[b"MetadataIndex"]).ok_or_else(not_one)?;
            let info = self.state(info, &[b"_StorageInfo"]).ok_or_else(not_one)?;
            let name = self.text(self.attribute(key, b"fqn")).ok_or_else(not_one)?;
            let at = match self.attribute(key, b"offset") {
                None => None,
                Some(id) if matches!(self.pickle.value(id), Value::None) => None,
                Some(id) => Some(self.sizes(Some(id)).ok_or_else(not_one)?),
            };
            let file = self.text(self.attribute(info, b"relative_path")).ok_or_else(not_one)?;
            let offset = self.number(self.attribute(info, b"offset"));
            let length = self.number(self.attribute(info, b"length"));
            let (Some(offset), Some(length)) = (offset, length) else {
                return Err(wrong(format!(
                    "{}: storage_data does not give its place as a range of bytes of a file",
                    shown(name)
                )));
            };
            let transforms = self.attribute(info, b"transform_descriptors").map(|id| self.pickle.value(id));
            let plain = match transforms {
                None | Some(Value::None) => true,
                Some(Value::Tuple(span)) => self.pickle.tuple(span).is_empty(),
                Some(Value::List(number)) => self.pickle.list(number).is_empty(),
                Some(_) => false,
            };
            if !plain {
                let problem =
                    "is transformed by an extension of its writer, which is not supported; save it without extensions";
                return Err(wrong(format!("{} {problem}", shown(name))));
            }
            let count = files.len() as i64;
            let file = match files.get(file) {
                Some(&number) => number,
                None => {
                    files.insert(file, count);
                    push(&mut self.index.files, file)?;
                    count
                }
            };
            if self.found.insert((name.as_bytes(), at), self.index.places.len()).is_some() {
                return Err(wrong(format!("{}: storage_data gives one chunk two places", shown(name))));
            }
            push(&mut self.index.places, Place { file, offset, length })?;
        }
        Ok(())
    }

    fn entry(&mut self, name: Id, entry: Id, poll: Poll<'_>) -> Result<()> {
        let name = self.text(Some(name)).ok_or_else(|| wrong("state_dict_metadata has a name that is not text"))?;
        if self.state(entry, &[b"BytesStorageMetadata"]).is_some() {
            let place = self.found.get(&(name.as_bytes(), None)).copied();
            let place = place.ok_or_else(|| wrong(format!("storage_data has no entry for {}", shown(name))))?;
            return push(&mut self.index.objects, (name, place));
        }
        let state = self.state(entry, &[b"TensorStorageMetadata"]);
        let state = state.ok_or_else(|| wrong(format!("{} is neither a tensor nor an object", shown(name))))?;
        let problem = |problem: String| wrong(format!("tensor {}: {problem}", shown(name)));
        let dtype = self.dtype(self.attribute(state, b"properties"));
        let dtype = dtype.ok_or_else(|| problem("has no dtype".to_owned()))?;
        let shape = self.sizes(self.attribute(state, b"size"));
        let shape = shape.ok_or_else(|| problem("has no shape of sizes from 0 to 2**63 - 1".to_owned()))?;
        let chunks = match self.attribute(state, b"chunks").map(|id| self.pickle.value(id)) {
            Some(Value::List(number)) => self.pickle.list(number),
            Some(Value::Tuple(span)) => self.pickle.tuple(span),
            _ => return Err(problem("has no list of chunks".to_owned())),
        };
        let (first, bounds) = (self.index.chunk_places.len(), self.index.bounds.len());
        for &chunk in chunks {
            let state = self.state(chunk, &[b"ChunkStorageMetadata"]).unwrap_or(&[]);
            let (offsets, sizes) = (self.attribute(state, b"offsets"), self.attribute(state, b"sizes"));
            let (Some(offsets), Some(sizes)) = (self.sizes(offsets), self.sizes(sizes)) else {
                return Err(problem("has an entry in its list of chunks that is not a chunk".to_owned()));
            };
            if offsets.len() != shape.len() || sizes.len() != shape.len() {
                let dims = (offsets.len(), sizes.len(), shape.len());
                return Err(problem(format!(
                    "has a chunk with {} and {}, but the shape of the tensor has {}",
                    counted(&dims.0, "offset", "offsets"),
                    counted(&dims.1, "size", "sizes"),
                    counted(&dims.2, "dim", "dims")
                )));
            }
            let is_empty = sizes.contains(&0);
            for (&start, &size) in offsets.iter().zip(&sizes) {
                let stop = start.checked_add(size).ok_or_else(|| problem("has a chunk beyond 2**63 - 1".to_owned()))?;
                push(&mut self.index.bounds, start)?;
                push(&mut self.index.bounds, stop)?;
            }
            let place = match self.found.get(&(name.as_bytes(), Some(offsets))) {
                Some(&place) => place as i64,
                None if is_empty => -1,
                None => return Err(problem("has a chunk for which storage_data has no entry".to_owned())),
            };
            push(&mut self.index.chunk_places, place)?;
        }
        let is_tiled = tiled(&shape, chunks.len(), &self.index.bounds[bounds..], poll)?;
        push(&mut self.index.tensors, Tensor { name, dtype, shape, first, chunks: chunks.len(), bounds, is_tiled })
    }

    /// The dtype in a `TensorProperties`, whose state is a tuple of which the length differs between versions.
    fn dtype(&self, properties: Option<Id>) -> Option<(&'a str, &'a str)> {
        let Value::Record(number) = self.pickle.value(properties?) else { return None };
        let record = self.pickle.record(number);
        let Value::Global(class) = self.pickle.value(record.callee) else { return None };
        if self.pickle.global(class).1 != b"TensorProperties" {
            return None;
        }
        let dtype = match self.pickle.value(record.state?) {
            Value::Tuple(span) => *self.pickle.tuple(span).first()?,
            Value::Dict(number) => self.attribute(self.pickle.dict(number), b"dtype")?,
            _ => return None,
        };
        let Value::Global(global) = self.pickle.value(dtype) else { return None };
        let (module, name) = self.pickle.global(global);
        Some((str::from_utf8(module).ok()?, str::from_utf8(name).ok()?))
    }
}

/// True if boxes tile a tensor; `false` also for what is not a tensor, so that it is looked at and
/// refused.
fn tiled(shape: &[i64], count: usize, bounds: &[i64], poll: Poll<'_>) -> Result<bool> {
    if count == 1 {
        return Ok(sides(bounds).zip(shape).all(|(side, &size)| side == (0, size)));
    }
    match one_each(shape, count, bounds, false).and_then(|boxes| boxes.check(poll)) {
        Ok(()) => Ok(true),
        Err(error @ (Error::Interrupted | Error::TooMany { .. })) => Err(error),
        Err(_) => Ok(false),
    }
}
