//! Where one message of the Redis protocol ends and the next begins.

/// The length of the first whole message in `bytes`; `None` while it is still arriving. What is no known type counts as
/// a line, so inline commands and line-wise echo servers work too.
pub fn message(bytes: &[u8]) -> Option<usize> {
    let line = bytes.windows(2).position(|pair| pair == b"\r\n")? + 2;
    let number = || std::str::from_utf8(&bytes[1..line - 2]).ok()?.parse::<i64>().ok();
    match bytes[0] {
        // Strings, errors and verbatim text come with their length; -1 is null.
        b'$' | b'!' | b'=' => {
            let end = line + usize::try_from(number().unwrap_or(-1)).map_or(0, |len| len + 2);
            (bytes.len() >= end).then_some(end)
        }
        b'*' | b'~' | b'>' => elements(bytes, line, number()),
        b'%' => elements(bytes, line, number().map(|pairs| pairs * 2)),
        _ => Some(line),
    }
}

fn elements(bytes: &[u8], mut end: usize, count: Option<i64>) -> Option<usize> {
    for _ in 0..count.unwrap_or(0) {
        end += message(&bytes[end..])?;
    }
    Some(end)
}

/// Whether the message is a RESP3 push: it answers no request.
pub fn is_push(message: &[u8]) -> bool {
    message.first() == Some(&b'>')
}
