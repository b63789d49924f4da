//! What the workers come for.
use anyhow::Context;
use std::{collections::BTreeMap, fmt, time::Duration};

/// One line of the file. Money is in cents.
pub(super) struct Order {
    month: String,
    customer: String,
    category: String,
    cents: u64,
}

/// Reads the orders.
pub(super) fn orders() -> anyhow::Result<Vec<Order>> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/orders.csv");
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
    text.lines().skip(1).map(|line| Order::parse(line).with_context(|| format!("not an order: {line:?}"))).collect()
}

impl Order {
    fn parse(line: &str) -> Option<Order> {
        let columns: Vec<&str> = line.split(',').collect();
        let &[date, _, customer, category, quantity, price] = &columns[..] else { return None };
        let price: u64 = price.replace('.', "").parse().ok()?;
        Some(Order {
            month: date.get(..7)?.to_owned(),
            customer: customer.to_owned(),
            category: category.to_owned(),
            cents: quantity.parse::<u64>().ok()? * price,
        })
    }
}

/// A year of orders, by month, category and customer.
#[derive(Default)]
pub(super) struct Report {
    months: BTreeMap<String, Month>,
    customers: BTreeMap<String, u64>,
}

#[derive(Default)]
struct Month {
    orders: usize,
    sales: u64,
    categories: BTreeMap<String, u64>,
}

impl Report {
    pub(super) async fn build(orders: &[Order], halfway: impl Fn()) -> Report {
        let mut report = Report::default();
        for (n, some) in orders.chunks(orders.len().div_ceil(12)).enumerate() {
            if n == 6 {
                halfway();
            }
            some.iter().for_each(|order| report.add(order));
            // The database that a larger shop would have takes its time.
            tokio::time::sleep(Duration::from_millis(80)).await;
        }
        report
    }

    fn add(&mut self, order: &Order) {
        let month = self.months.entry(order.month.clone()).or_default();
        month.orders += 1;
        month.sales += order.cents;
        *month.categories.entry(order.category.clone()).or_default() += order.cents;
        *self.customers.entry(order.customer.clone()).or_default() += order.cents;
    }

    pub(super) fn orders(&self) -> usize {
        self.months.values().map(|month| month.orders).sum()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let money = |cents: u64| format!("{}.{:02}", cents / 100, cents % 100);
        writeln!(f, "  month    orders        sales  best category")?;
        for (name, month) in &self.months {
            let best = month.categories.iter().max_by_key(|(_, cents)| **cents);
            let best = best.map_or("", |(category, _)| category);
            writeln!(f, "  {name} {:>8} {:>12}  {best}", month.orders, money(month.sales))?;
        }
        let mut customers: Vec<_> = self.customers.iter().collect();
        customers.sort_by_key(|(_, cents)| std::cmp::Reverse(**cents));
        let best: Vec<_> = customers.iter().take(3).map(|(name, cents)| format!("{name} {}", money(**cents))).collect();
        write!(f, "  best customers: {}", best.join(", "))
    }
}
