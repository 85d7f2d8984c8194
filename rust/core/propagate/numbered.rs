//! Equal values as one number, and maps of numbers that are looked up for each op.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hash, Hasher},
};

/// A map whose keys are numbers or addresses of our own, so that nobody can choose them to collide.
pub(super) type Map<K, V> = HashMap<K, V, BuildHasherDefault<Quick>>;

/// A hash of few operations: each number is added to a product.
#[derive(Default)]
pub(super) struct Quick(u64);

impl Hasher for Quick {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = self.0.wrapping_add(number).wrapping_mul(0xf135_7aea_2e62_a9c5);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn finish(&self) -> u64 {
        // The high bits depend on all bits of all numbers.
        self.0.rotate_left(26)
    }
}

/// Values, each once, in the order in which they came.
pub(super) struct Numbered<T> {
    all: Vec<T>,
    numbers: Map<T, u32>,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self { all: Vec::new(), numbers: Map::default() }
    }
}

impl<T: Clone + Eq + Hash> Numbered<T> {
    /// The number of a value.
    pub(super) fn of(&mut self, value: T) -> u32 {
        *self.numbers.entry(value).or_insert_with_key(|value| {
            self.all.push(value.clone());
            self.all.len() as u32 - 1
        })
    }

    /// The value of a number.
    pub(super) fn at(&self, number: u32) -> &T {
        &self.all[number as usize]
    }
}
