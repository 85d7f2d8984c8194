//! Numbers in decimal digits with commas between them: a mesh may have a million ids.

/// A field separator, and numbers that are not negative with commas between them.
pub(super) fn joined_numbers(numbers: impl Iterator<Item = i64>) -> String {
    let mut text = Vec::with_capacity(6 * numbers.size_hint().0 + 1 + Decimal::MOST);
    let mut decimal = Decimal::new(0);
    let mut expected = None;
    text.push(b'|');
    for number in numbers {
        // Ids mostly go up by one, and counting is faster than dividing by ten again and again.
        if expected == Some(number) {
            decimal.increment()
        } else {
            decimal = Decimal::new(number)
        }
        decimal.push_to(&mut text);
        expected = Some(number.wrapping_add(1));
    }
    if expected.is_some() {
        text.pop(); // The comma after the last.
    }
    // Digits and commas are always valid text.
    String::from_utf8(text).unwrap_or_default()
}

/// A number in decimal digits, and a comma; it can count up.
struct Decimal {
    /// The number and the comma, and then anything.
    text: [u8; Self::MOST],
    digits: usize,
}

impl Decimal {
    /// The digits of the largest number, and the comma.
    const MOST: usize = 20;

    fn new(mut number: i64) -> Self {
        let (mut text, mut start) = ([b','; Self::MOST], Self::MOST - 1);
        loop {
            start -= 1;
            text[start] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                text.rotate_left(start);
                return Self { text, digits: Self::MOST - 1 - start };
            }
        }
    }

    fn increment(&mut self) {
        for digit in self.text[..self.digits].iter_mut().rev() {
            if *digit < b'9' {
                *digit += 1;
                return;
            }
            *digit = b'0';
        }
        // All of them were nines.
        self.text[..=self.digits].rotate_right(1);
        self.text[0] = b'1';
        self.digits += 1;
        self.text[self.digits] = b',';
    }

    /// Appends number and comma. As many bytes each time, which are some instructions: what is too much goes again.
    #[inline]
    fn push_to(&self, text: &mut Vec<u8>) {
        text.extend_from_slice(&self.text);
        text.truncate(text.len() - Self::MOST + self.digits + 1);
    }
}
