"""State kept between requests: stored responses, their events, and the database."""
